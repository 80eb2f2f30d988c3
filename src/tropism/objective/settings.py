"""The choices that make up an objective, checked together before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tropism.objective.advantages import Scale
from tropism.objective.kl import Estimator
from tropism.objective.losses import Loss
from tropism.objective.mismatch import Correction


@dataclass(frozen=True)
class Objective:
    """What GRPO optimises.

    Args:
        loss: Token loss and denominator (the table in ``tropism.objective.losses``).
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: And above 1 + clip_high; larger than clip_low is DAPO's clip-higher. For
            ``cispo`` the weight's cap is 1 + clip_high (4 is usual there).
        dual_clip: Bound of the ratio where the advantage is negative, above 1 + clip_high; null
            for none.
        sapo_temperatures: Steepness of SAPO's gate for positive and other advantages.
        beta: Weight of KL(policy || reference) in the loss. At 0 no reference pass runs and no
            reference is kept.
        kl: Which estimate of it.
        reference_every: The reference is the starting policy; with a number it becomes the
            present policy after every so many rollouts.
        scale: Advantages are divided by the group's or the batch's standard deviation, or not.
        aggregation: Sum the weighted components and normalise the sum, or normalise each
            component first (GDPO; ``scale`` is not used then).
        num_iterations: Optimizer steps on each rollout batch (mu).
        mismatch: Correction for a sampler that is not quite the trainer.
        mismatch_range: Range of the ratio trainer / sampler that the correction allows; null at
            an end for no bound.
        mask_truncated: Leave completions cut at the limit out of the loss and its denominators
            (they still count in their group's mean).
        overlong_buffer: Tokens before the limit over which a penalty of up to 1 grows (DAPO).
        entropy_bonus: Weight of the mean token entropy, which is maximised.
        entropy_top_fraction: Only this share of a rollout's tokens, those of the highest
            entropy, has a policy gradient (2506.01939).
        max_resamples: Times that groups whose rewards are all equal are sampled anew (dynamic
            sampling).
    """

    loss: Loss = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    beta: float = 0.0
    kl: Estimator = "k3"
    reference_every: int | None = None
    scale: Scale = "group"
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    num_iterations: int = 1
    mismatch: Correction = "none"
    mismatch_range: tuple[float | None, float | None] = (None, 2.0)
    mask_truncated: bool = False
    overlong_buffer: int | None = None
    entropy_bonus: float = 0.0
    entropy_top_fraction: float = 1.0
    max_resamples: int = 0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "beta", "entropy_bonus", "max_resamples"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"objective.{name}={getattr(self, name)}: give a value >= 0.")
        if self.clip_low >= 1:
            raise ValueError(
                f"objective.clip_low={self.clip_low}: ratios are positive, so give a value < 1."
            )
        for name in ("num_iterations", "reference_every", "overlong_buffer"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"objective.{name}={value}: give at least 1.")
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"objective.dual_clip={self.dual_clip}: give more than 1 + clip_high = "
                f"{1 + self.clip_high}, or null."
            )
        if self.reference_every is not None and self.beta == 0:
            raise ValueError(
                f"objective.reference_every={self.reference_every} with beta=0: there is no "
                "reference to refresh; set beta above 0 or leave reference_every null."
            )
        if not 0 < self.entropy_top_fraction <= 1:
            raise ValueError(
                f"objective.entropy_top_fraction={self.entropy_top_fraction}: give a share in "
                "(0, 1]; 1 keeps all tokens."
            )
        if self.aggregation == "normalize_then_sum" and self.scale != "group":
            raise ValueError(
                f"objective.scale={self.scale!r} has no meaning with aggregation="
                "'normalize_then_sum', which scales each component by its group's standard "
                "deviation; leave it at 'group'."
            )
        low, high = self.mismatch_range
        if low is not None and high is not None and low >= high:
            raise ValueError(f"objective.mismatch_range=[{low}, {high}]: the first must be less.")
