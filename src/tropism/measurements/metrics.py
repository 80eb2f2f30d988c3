"""Every metric name that a run logs, in one place; the README's glossary defines them.

Names are ``area/name``. Where the meaning is TRL's, so is the last part of the name.
x is the rollout for all but ``objective/loss``, ``objective/grad_norm`` and ``objective/lr``,
which belong to an optimizer step and are drawn over optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping

REWARD = "reward/total"
REWARD_GROUP_STD = "reward/group_std"
"""Mean over groups of the standard deviation within a group: what advantages live on."""
REWARD_BATCH_STD = "reward/batch_std"
"""Standard deviation over all completions of the rollout, prompts' difficulty included."""

LOSS = "objective/loss"
KL = "objective/kl"
ENTROPY = "objective/entropy"
GRAD_NORM = "objective/grad_norm"
LEARNING_RATE = "objective/lr"
CLIPPED_LOW = "clip_ratio/low_mean"
CLIPPED_HIGH = "clip_ratio/high_mean"

COMPLETION_LENGTH = "rollouts/completion_length"
COMPLETION_LENGTH_MAX = "rollouts/completion_length_max"
CLIPPED_RATIO = "rollouts/clipped_ratio"
"""Share of completions cut at the token limit (nothing to do with the objective's clipping)."""
FRAC_REWARD_ZERO_STD = "rollouts/frac_reward_zero_std"
SAMPLER_GAP = "rollouts/sampler_gap"
SAMPLER_GAP_MAX = "rollouts/sampler_gap_max"
STALENESS = "rollouts/staleness"
"""Optimizer steps between the policy that sampled a rollout and the one that learns from it."""
MISMATCH_EFFECTIVE = "mismatch/effective_share"
"""Effective sample size of the ratios trainer / sampler, over the number of tokens."""
MISMATCH_CORRECTED = "mismatch/corrected"
"""Share of tokens whose ratio left ``objective.mismatch_range``."""
SAMPLES = "rollouts/samples"

TOKENS = "system/tokens"
TOKENS_PER_SECOND = "system/tokens_per_second"
"""Completion tokens per second of sampling."""
TOKENS_PER_SECOND_OVERALL = "system/tokens_per_second_overall"
"""Completion tokens per second of the whole rollout: sampling, scoring, probes and training."""
TRAINABLE_PARAMS = "system/trainable_params"
PREFIX_CACHE_HITS = "system/prefix_cache_hits"
"""Share of prompt tokens that an engine of its own had computed before."""
QUEUE_SECONDS = "system/queue_seconds"
"""Mean time that a completion waited in an engine's queue."""
SYNC_SECONDS = "system/sync_seconds"
"""Time that an engine's weights took to follow the trainer's."""
SYNC_MEGABYTES = "system/sync_megabytes"
"""Weights sent for that, in 1e6 bytes."""

UPDATE_NORM_HEAT_MAP = "update_norms/cumulative"
STEP_NORM_HEAT_MAP = "update_norms/step"
REALISED_UPDATE = "update_norms/realised"
"""Norm of the update that reached the weights over that which AdamW asked for."""

SNR_HEAT_MAP = "pressure/snr"
"""Signal's share of the energy of a prompt's gradient, linear by linear."""
DEBIASED_HEAT_MAP = "pressure/debiased"
POOLED_Z = "pressure/pooled_z"
NOISE_SCALE = "pressure/noise_scale"
"""Groups at which an update's signal equals its noise; compare with ``rollouts/groups``."""
GAIN_HEAT_MAP = "gain/by_linear"
"""What the last updates of a linear added to the objective, per unit of its step size."""
GAIN_Z = "gain/z"
"""Standard deviations of all linears' gain above that under permuted advantages."""
GAIN_SHARED_KL = "gain/shared_kl"
"""Part of an update's KL that no linear causes alone, because all push the same completions."""
PROBE_COST = "pressure/cost_share"
"""Share of the run's time that probes have taken."""
GROUPS = "rollouts/groups"
GROUP_SIZE = "rollouts/group_size"

PLAN_TIMELINE = "plan/timeline"
LR_SCALE_HEAT_MAP = "plan/lr_scale"
PLAN_JACCARD = "plan/jaccard"
"""Linears that train both before and after the last switch, over those that train in either."""
PLAN_TRAINED = "plan/trained_linears"
GUARD_KL = "plan/guard_kl"
"""KL(before || after) of one update on a few completions, while a switch is watched."""

PASS, PASS_LOW, PASS_HIGH = "pass", "pass_low", "pass_high"
"""Names of ``evaluation``: the pass rate, and the bounds of its 95 % Wilson interval."""

PHASES = ("rollout", "reward", "train", "probe")
"""Keys of ``RolloutBatch.seconds``; the ``steps`` table has a ``seconds_`` column for each."""

PER_ROLLOUT: Mapping[str, str] = {
    "reward": REWARD,
    "reward_std": REWARD_GROUP_STD,
    "frac_reward_zero_std": FRAC_REWARD_ZERO_STD,
    "kl": KL,
    "entropy": ENTROPY,
    "completion_length": COMPLETION_LENGTH,
    "clipped_ratio": CLIPPED_RATIO,
    "sampler_gap": SAMPLER_GAP,
    "tokens": TOKENS,
    "trainable_params": TRAINABLE_PARAMS,
}
"""Columns of the ``steps`` table drawn over rollouts."""

PER_STEP: Mapping[str, str] = {"loss": LOSS, "grad_norm": GRAD_NORM, "lr": LEARNING_RATE}
"""Columns of the ``steps`` table drawn over optimizer steps, where one was taken."""


def reward_component(component: str) -> str:
    """Mean of one reward component over the completions where it applied."""
    return f"reward/{component}"


def reward_weight(component: str) -> str:
    """Weight of one reward component."""
    return f"reward_weights/{component}"


def gradient_share(component: str) -> str:
    """Part of the update energy that comes from one reward component."""
    return f"reward_gradients/share/{component}"


def reward_cosine(component: str, other: str) -> str:
    """Cosine of two components' gradients, over all linears that train."""
    return f"reward_gradients/cosine/{component}/{other}"


def seconds(phase: str) -> str:
    """Wall time of one phase of a rollout."""
    return f"system/seconds_{phase}"


def evaluation(task: str, name: str) -> str:
    """Greedy evaluation on held-out prompts: ``pass`` and its bounds, or one component."""
    return f"eval/{task}/{name}"


def benchmark(name: str, metric: str, model: str) -> str:
    """One metric of a model on a benchmark of ``tropism test``, over the model's rollouts."""
    return f"test/{name}/{metric.replace('@', '_at_')}/{model}"


def drift(task: str, direction: str) -> str:
    """KL between the starting policy and the tuned one: ``forward`` or ``reverse``."""
    return f"drift/{task}/{direction}_kl"


def alarm(name: str) -> str:
    """1 while an alarm of ``tropism.measurements.alarms`` rings, else 0."""
    return f"alarms/{name}"
