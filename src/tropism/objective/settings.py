"""The choices that make up an objective, checked together before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tropism.objective.advantages import Scale
from tropism.objective.losses import Loss


@dataclass(frozen=True)
class Objective:
    """What GRPO optimises.

    Args:
        loss: Whose denominator (see ``tropism.objective.losses``).
        clip_low: The ratio is clipped below 1 - clip_low.
        clip_high: And above 1 + clip_high; larger than clip_low is DAPO's clip-higher.
        beta: Weight of KL(policy || starting policy), k3, in the loss. At 0 no reference pass
            runs and no reference is kept.
        scale: Divide advantages by the group's standard deviation, or by nothing.
        num_iterations: Optimizer steps on each rollout batch (mu).
    """

    loss: Loss = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    scale: Scale = "group"
    num_iterations: int = 1

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "beta"):
            if getattr(self, name) < 0:
                raise ValueError(f"objective.{name}={getattr(self, name)}: give a value >= 0.")
        if self.clip_low >= 1:
            raise ValueError(
                f"objective.clip_low={self.clip_low}: ratios are positive, so give a value < 1."
            )
        if self.num_iterations < 1:
            raise ValueError(
                f"objective.num_iterations={self.num_iterations}: give at least 1 update."
            )
