"""What TensorBoard's Custom Scalars tab shows of a run: which charts there are, in which order.

A chart is left out where the run has nothing to draw in it. No chart names a run or a reward
component: those of several runs then fall into one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from torch.utils.tensorboard.summary import custom_scalars

from tropism.measurements import metrics as names
from tropism.measurements.disk import explained_disk_full
from tropism.rollouts.engine import RemoteEngine
from tropism_callbacks.tensorboard import summary_writer

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning

Layout = dict[str, dict[str, list[str | list[str]]]]
"""Category -> title -> ["Multiline", patterns] or ["Margin", [value, low, high]]."""

HELD_OUT, REFERENCE, REMOTE = "held-out prompts", "reference", "remote engine"
AHEAD, MISMATCH, GAIN = "rollouts ahead", "mismatch corrected", "gain measured"
ANY = "[^/]+"


def _except(*left_out: str) -> str:
    return f"(?!(?:{'|'.join(left_out)})$){ANY}"


COMPONENT = _except(
    *(n.split("/")[1] for n in (names.REWARD, names.REWARD_GROUP_STD, names.REWARD_BATCH_STD))
)


@dataclass(frozen=True)
class Chart:
    """Metrics that are read together.

    Args:
        title: Unique in its category.
        metrics: Regular expressions for whole names.
        needs: What none of them is logged without: a callback or a module, by the name of its
            class, or one of the names above.
    """

    title: str
    metrics: tuple[str, ...]
    needs: str | None = None


CATEGORIES: Mapping[str, tuple[Chart, ...]] = {
    "Held-out prompts": (
        Chart(
            "Mean of each component",
            (names.evaluation(ANY, _except(names.PASS_LOW, names.PASS_HIGH)),),
            needs=HELD_OUT,
        ),
        Chart("KL to the starting policy, nats", (names.drift(ANY, ANY),), needs="KLDrift"),
    ),
    "Rollouts": (
        Chart("Reward", (names.REWARD,)),
        Chart("Reward components", (names.reward_component(COMPONENT),)),
        Chart("Standard deviation of rewards", (names.REWARD_GROUP_STD, names.REWARD_BATCH_STD)),
        Chart("Share of groups without signal", (names.FRAC_REWARD_ZERO_STD,)),
        Chart("Completion length, tokens", (names.COMPLETION_LENGTH, names.COMPLETION_LENGTH_MAX)),
        Chart("Share of completions cut at the limit", (names.CLIPPED_RATIO,)),
        Chart("Alarms: 1 while one rings", (names.alarm(ANY),), needs="Alarms"),
    ),
    "Loop": (
        Chart("Evidence: pooled z of the signal", (names.POOLED_Z,), needs="Pressure"),
        # Not one chart: the few points of one are outliers among the many of the other, which
        # TensorBoard leaves out of the scaling.
        Chart("Groups needed (noise scale)", (names.NOISE_SCALE,), needs="Pressure"),
        Chart("Groups used", (names.GROUPS,), needs="Pressure"),
        Chart("Gain of the last updates: z", (names.GAIN_Z,), needs=GAIN),
        Chart("Part of an update's KL that linears share", (names.GAIN_SHARED_KL,), needs=GAIN),
        Chart("Completions per group", (names.GROUP_SIZE,), needs="AdaptiveRollouts"),
        Chart("Linears that train", (names.PLAN_TRAINED,), needs="AdaptiveLoRA"),
        Chart("Linears kept by a switch (Jaccard)", (names.PLAN_JACCARD,), needs="AdaptiveLoRA"),
        Chart("KL of one update after a switch", (names.GUARD_KL,), needs="AdaptiveLoRA"),
        Chart("Reward weights", (names.reward_weight(ANY),), needs="AdaptiveRewards"),
        Chart("Components' shares of the gradient", (names.gradient_share(ANY),), needs="Pressure"),
        Chart(
            "Cosines of components' gradients", (names.reward_cosine(ANY, ANY),), needs="Pressure"
        ),
    ),
    "Objective": (
        Chart("Loss, over optimizer steps", (names.LOSS,)),
        Chart("Gradient norm, over optimizer steps", (names.GRAD_NORM,)),
        Chart("Learning rate, over optimizer steps", (names.LEARNING_RATE,)),
        Chart("Entropy, nats per token", (names.ENTROPY,)),
        Chart("KL to the starting policy, nats", (names.KL,), needs=REFERENCE),
        Chart("Share of ratios clipped", (names.CLIPPED_LOW, names.CLIPPED_HIGH), needs="GRPO"),
        Chart("Share of the update realised", (names.REALISED_UPDATE,), needs="UpdateNorms"),
    ),
    "System": (
        Chart("Seconds per phase", (names.seconds(ANY),)),
        Chart("Tokens per second", (names.TOKENS_PER_SECOND, names.TOKENS_PER_SECOND_OVERALL)),
        Chart("Tokens per rollout", (names.TOKENS,)),
        Chart("Sampler's gap to the trainer", (names.SAMPLER_GAP,), needs="GRPO"),
        Chart("Largest gap of a token to the trainer", (names.SAMPLER_GAP_MAX,), needs="GRPO"),
        Chart("Optimizer steps since it was sampled", (names.STALENESS,), needs=AHEAD),
        Chart(
            "Ratios trainer / sampler: effective share", (names.MISMATCH_EFFECTIVE,), needs=MISMATCH
        ),
        Chart("Share of ratios corrected", (names.MISMATCH_CORRECTED,), needs=MISMATCH),
        Chart("Engine: seconds of a weight sync", (names.SYNC_SECONDS,), needs=REMOTE),
        Chart("Engine: megabytes sent", (names.SYNC_MEGABYTES,), needs=REMOTE),
        Chart("Engine: share of prompt tokens cached", (names.PREFIX_CACHE_HITS,), needs=REMOTE),
        Chart("Engine: seconds in the queue", (names.QUEUE_SECONDS,), needs=REMOTE),
        Chart("Probes' share of the time", (names.PROBE_COST,), needs="Pressure"),
        Chart("Trainable parameters", (names.TRAINABLE_PARAMS,)),
    ),
}
"""Beside the pass rates of the tasks. TensorBoard draws those after the others of a category."""


def layout_of(parts: Collection[str], tasks: Iterable[str]) -> Layout:
    """The charts of a run.

    Args:
        parts: Everything that charts may need and the run has.
        tasks: The tasks that are evaluated, where held-out prompts are among ``parts``.
    """
    layout: Layout = {}
    for category, charts in CATEGORIES.items():
        for chart in charts:
            if chart.needs is None or chart.needs in parts:
                patterns = [f"^{metric}$" for metric in chart.metrics]
                layout.setdefault(category, {})[chart.title] = ["Multiline", patterns]
    for task in tasks if HELD_OUT in parts else ():
        interval = [
            names.evaluation(task, n) for n in (names.PASS, names.PASS_LOW, names.PASS_HIGH)
        ]
        layout["Held-out prompts"][f"{task}: pass, 95 % interval"] = ["Margin", interval]
    return layout


def log_layout(trainer: Trainer, module: FineTuning) -> None:
    """Write the layout, once training starts; a resumed run's folder has it already."""
    writer = summary_writer(trainer)
    if writer is None:
        return
    layout = layout_of(_parts(trainer, module), module.evaluated_tasks)
    (value,) = custom_scalars(layout).value
    (written,) = value.tensor.string_val
    events = Path(writer.log_dir).glob("events.out.tfevents.*")
    if not any(written in file.read_bytes() for file in events):
        with explained_disk_full(trainer.log_dir or "."):
            writer.add_custom_scalars(layout)


def _parts(trainer: Trainer, module: Any) -> set[str]:
    objects = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    parts = {base.__name__ for each in objects for base in type(each).__mro__}
    if sum(trainer.num_val_batches):
        parts.add(HELD_OUT)
    if "GRPO" in parts and module.objective.beta > 0:
        parts.add(REFERENCE)
    if "GRPO" in parts and isinstance(module.engine, RemoteEngine):
        parts.add(REMOTE)
    if any(getattr(each, "should_measure_gain", False) for each in objects):
        parts.add(GAIN)
    if "GRPO" in parts and module.rollouts_ahead:
        parts.add(AHEAD)
    if "GRPO" in parts and module.objective.mismatch != "none":
        parts.add(MISMATCH)
    return parts
