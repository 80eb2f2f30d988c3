"""Group-relative advantages.

GRPO (2402.03300, eq. 3) compares each completion with the others of its own prompt. ``scale``
chooses what the difference is divided by: the group's standard deviation (GRPO), the rollout
batch's (REINFORCE++-like, 2501.03262), or nothing (Dr. GRPO, 2503.20783: dividing by the group's
favours prompts that are almost solved or almost lost). With several reward components,
``component_advantages`` normalises each before they are summed (GDPO, 2601.05242).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does: keeps an almost constant group finite."""

EQUAL = 1e-6
"""Rewards of a group within this of each other (relative to those above 1) count as equal."""


class Advantages(NamedTuple):
    """Advantages with what was known about each group while making them."""

    values: Float[Tensor, " B"]
    group_std: Float[Tensor, " P"]
    zero_variance: Bool[Tensor, " P"]


def group_advantages(
    rewards: Float[Tensor, " B"], *, group_size: int, scale: Scale = "group"
) -> Advantages:
    """Centre each group's rewards and scale them.

    Args:
        rewards: [B] in row order, prompt by prompt.
        group_size: G; the standard deviation is the unbiased one, over G - 1.
        scale: ``group`` divides by the group's standard deviation + 1e-4, ``batch`` by that of
            all B rewards + 1e-4, ``none`` by nothing.

    Returns:
        Advantages [B], standard deviation within each group [P], and which groups [P] have
        equal rewards throughout: their advantages are exactly 0, whatever the scale.

    Raises:
        ValueError: G < 2, or B is not a multiple of it.
    """
    groups = _groups(rewards, group_size)  # (P, G)
    zero_variance = _is_constant(groups)  # (P,)
    std = torch.where(zero_variance, 0.0, groups.std(dim=1))  # (P,)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (std[:, None] + EPSILON)
    elif scale == "batch":
        centred = centred / (rewards.std() + EPSILON)
    # A mean of equal floats can differ from them by rounding; no signal must mean exactly none.
    values = torch.where(zero_variance[:, None], 0.0, centred)
    return Advantages(values.reshape(-1), std, zero_variance)


def component_advantages(
    components: Mapping[str, Float[Tensor, " B"]],
    *,
    weights: Mapping[str, float],
    group_size: int,
) -> Advantages:
    """Normalise each component within its group, sum by weight, normalise over the batch (GDPO).

    A component with a small spread then counts as much as one with a large spread.

    Args:
        components: Name -> [B], NaN where a sample abstained: it then adds 0, its group's mean.
        weights: Name -> weight.
        group_size: G.

    Returns:
        Advantages [B]; standard deviation within each group [P] of the weighted sum of z-scores;
        groups [P] in which no weighted component varies.

    Raises:
        ValueError: G < 2, or B is not a multiple of it.
    """
    if not components:
        raise ValueError("there is no reward component to normalise.")
    total = _sum_of_scores(components, weights, group_size)
    zero_variance = (total == 0).all(dim=1)
    values = total / (total.std() + EPSILON)  # each group's mean, and so the batch's, is 0
    return Advantages(values.reshape(-1), total.std(dim=1), zero_variance)


def component_shares(
    components: Mapping[str, Float[Tensor, " B"]],
    *,
    rewards: Float[Tensor, " B"],
    weights: Mapping[str, float],
    group_size: int,
    scale: Scale = "group",
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> dict[str, Float[Tensor, " B"]]:
    """Each component's part of the advantages at weight 1: sum_k weights[k] * share_k = A.

    The divisor (standard deviation of the summed rewards, of the group or the batch) is taken as it
    was measured. A penalty beside the components (soft overlong) is nobody's share.

    Args:
        components: Name -> [B], NaN where a sample abstained: its share is 0, its group's mean.
        rewards: [B] what the advantages were made of.
        weights: Name -> weight.
        group_size: G.
        scale: As for the advantages.
        aggregation: As for the advantages.
    """
    if aggregation == "normalize_then_sum":
        divisor = _sum_of_scores(components, weights, group_size).std() + EPSILON
        return {
            name: (_scores(values, group_size) / divisor).reshape(-1)
            for name, values in components.items()
        }
    groups = _groups(rewards, group_size)
    has_signal = ~_is_constant(groups)[:, None]
    spread = groups.new_ones(())
    if scale == "group":
        spread = groups.std(dim=1, keepdim=True) + EPSILON
    elif scale == "batch":
        spread = rewards.std() + EPSILON
    return {
        name: torch.where(has_signal, _centred(values, group_size)[0] / spread, 0.0).reshape(-1)
        for name, values in components.items()
    }


def _sum_of_scores(
    components: Mapping[str, Float[Tensor, " B"]], weights: Mapping[str, float], group_size: int
) -> Float[Tensor, "P G"]:
    """The weighted sum of the components, each normalised within its group."""
    parts = [_scores(values, group_size) * weights[name] for name, values in components.items()]
    return torch.stack(parts).sum(dim=0)


def _scores(values: Tensor, group_size: int) -> Tensor:
    """[P, G] z-scores within each group, 0 where a sample abstained or all are equal."""
    centred, filled, known = _centred(values, group_size)
    count = known.sum(dim=1, keepdim=True)
    std = (centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(_is_constant(filled)[:, None], 0.0, centred / (std + EPSILON))


def _centred(values: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[P, G] differences from the group's mean (0 where abstained), filled values, who judged."""
    groups = _groups(values, group_size)
    known = ~groups.isnan()
    mean = groups.nanmean(dim=1, keepdim=True)
    centred = torch.where(known, groups - mean, 0.0)
    return centred, torch.where(known, groups, mean).nan_to_num(0.0), known


def _groups(rewards: Tensor, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: a group needs at least 2 completions.")
    if rewards.numel() % group_size:
        raise ValueError(
            f"{rewards.numel()} rewards do not make whole groups of group_size={group_size}."
        )
    return rewards.view(-1, group_size)


def _is_constant(groups: Tensor) -> Tensor:
    """[P] groups whose rewards are equal.

    Sums that differ by rounding alone are equal: dividing by their spread would make it signal.
    """
    spread = groups.amax(dim=1) - groups.amin(dim=1)
    return spread <= EQUAL * groups.abs().amax(dim=1).clamp(min=1)
