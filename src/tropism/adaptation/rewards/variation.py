"""Weights by relative spread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PolicyState, RewardObservation
from tropism.adaptation.rewards.weights import answer, hold, is_movable, outcome_of
from tropism.adaptation.scaling import scale_within
from tropism.adaptation.settings import require
from tropism.adaptation.smoothing import all_updated


@dataclass(frozen=True, kw_only=True)
class SAW:
    """Stage-aware weighting (SAW, 2606.07705): w_k in proportion to the coefficient of variation.

    cv_k = group_std_k / mean_k is large for what is not learnt yet, and falls as a component
    saturates. The weights of all components sum to what they summed to before.

    It differs from the paper in four ways: the standard deviation is the mean one *within* groups
    (what an advantage sees), not the batch's; cv is averaged over decisions, not taken per batch;
    no weight leaves [min_factor, max_factor] of its initial value or moves by more than
    ``max_step`` in a decision; and the outcome never falls below its initial weight. Bounds win
    over the sum where both cannot hold. Penalties, weights of 0 and components without a positive
    mean stay. As in the paper it goes with either aggregation of the objective.

    Args:
        min_factor: Least multiple of the initial weight, in (0, 1].
        max_factor: Largest multiple of the initial weight, >= 1.
        max_step: Largest factor by which a weight changes in one decision, > 1.
        smoothing: Weight of earlier decisions in the averages, in [0, 1).
    """

    min_factor: float = 0.25
    max_factor: float = 4.0
    max_step: float = 1.5
    smoothing: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.min_factor <= 1, self, "min_factor", "give a value in (0, 1]")
        require(1 <= self.max_factor < math.inf, self, "max_factor", "give 1 or more")
        require(1 < self.max_step < math.inf, self, "max_step", "give more than 1")
        require(0 <= self.smoothing < 1, self, "smoothing", "give a value in [0, 1)")

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds where fewer than two components have a defined, and one a positive, cv."""
        outcome = outcome_of(observation)
        variations = {
            c.name: c.group_std / c.mean
            if c.group_std is not None and c.mean is not None and c.mean > 0
            else None
            for c in observation.components
        }
        averages = all_updated(state.get("averages", {}), variations, self.smoothing)
        after = {"averages": averages}
        movers = [
            c
            for c in observation.components
            if is_movable(c) and c.initial_weight > 0 and variations[c.name] is not None
        ]
        values = [averages[c.name][0] for c in movers]
        if len(movers) < 2 or max(values) == 0:
            reason = f"{len(movers)} components have a coefficient of variation, 2 are needed"
            return hold(observation, reason, state=after)
        low, high = [], []
        for c in movers:
            least = 1.0 if c.name == outcome.name else self.min_factor
            bottom, top = least * c.initial_weight, self.max_factor * c.initial_weight
            low.append(min(top, max(bottom, c.weight / self.max_step)))
            high.append(max(bottom, min(top, c.weight * self.max_step)))
        weights = scale_within(
            values,
            weights=[1.0] * len(movers),
            low=low,
            high=high,
            total=math.fsum(c.weight for c in movers),
            power=1,
        )
        notes = ", ".join(
            f"{c.name} {value:.2f} -> {weight:.3g}"
            for c, value, weight in zip(movers, values, weights, strict=True)
        )
        changes = {c.name: weight for c, weight in zip(movers, weights, strict=True)}
        reason = f"coefficient of variation -> weight: {notes}"
        return answer(observation, changes, reason=reason, state=after)
