"""What a checkpoint may be resumed with: the same policy and rewards, another learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Without these the stored tensors mean another policy.
SAME_POLICY = {
    "model": ("name", "adapter", "dtype"),
    "lora": ("rank", "alpha", "modules", "layers"),
}


def check_same_policy(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse settings under which the checkpoint's tensors would be another policy.

    Args:
        saved: The checkpoint's hyperparameters.
        present: This run's.

    Raises:
        ValueError: Names each setting with both values.
    """
    differing = [
        f"{group}.{name}: {before!r} in the checkpoint, {now!r} here"
        for group, names in SAME_POLICY.items()
        for name in names
        if (before := (saved[group] or {}).get(name)) != (now := (present[group] or {}).get(name))
    ]
    if differing:
        raise ValueError(
            f"the checkpoint belongs to other settings ({'; '.join(differing)}). Use the config of "
            "the run that wrote it (config.yaml in its folder)."
        )


def check_same_rewards(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse extra rewards that judge otherwise than those of the checkpoint's run.

    Args:
        saved: ``ExtraReward.identity`` of each, in the checkpoint.
        present: The same, of this run.

    Raises:
        ValueError: Names each setting with both values.
    """
    before, now = ({one["name"]: one for one in rewards} for rewards in (saved, present))
    differing = [
        f"extra_rewards.{name}.{setting}: {before[name].get(setting)!r} in the checkpoint, "
        f"{now[name].get(setting)!r} here"
        for name in before
        if name in now
        for setting in sorted(before[name].keys() | now[name].keys())
        if before[name].get(setting) != now[name].get(setting)
    ]
    if differing:
        raise ValueError(
            f"the checkpoint's run was rewarded otherwise ({'; '.join(differing)}). Use the config "
            "of the run that wrote it (config.yaml in its folder), or start from its adapter "
            "(model.adapter)."
        )


def apply_learning_rate(checkpoint: dict[str, Any], present: Mapping[str, Any]) -> None:
    """Let a resumed run go on at this run's peak learning rate, at the same place of the schedule.

    Raises:
        ValueError: Another setting of the optimizer differs: its state would not fit.
    """
    saved = checkpoint["hyper_parameters"]["optimizer"]
    others = {name for name in present if present[name] != saved.get(name)}
    others -= {"learning_rate", "max_grad_norm"}  # the norm is not part of any state
    if others:
        raise ValueError(
            f"resuming with another optimizer.{sorted(others)[0]} is not possible; only "
            "learning_rate and max_grad_norm can change. Use the config of the run that wrote the "
            "checkpoint."
        )
    ratio = present["learning_rate"] / saved["learning_rate"]
    if ratio == 1:
        return
    for state in checkpoint["optimizer_states"]:
        for group in state["param_groups"]:
            group["lr"] *= ratio
            group["initial_lr"] *= ratio
    for schedule in checkpoint["lr_schedulers"]:
        schedule["base_lrs"] = [rate * ratio for rate in schedule["base_lrs"]]
        schedule["_last_lr"] = [rate * ratio for rate in schedule["_last_lr"]]
