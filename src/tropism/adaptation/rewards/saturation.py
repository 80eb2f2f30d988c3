"""What is learnt weighs less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PolicyState, RewardObservation
from tropism.adaptation.rewards.weights import answer, is_movable, outcome_of
from tropism.adaptation.settings import require


@dataclass(frozen=True, kw_only=True)
class SaturationDecay:
    """A component whose mean stays above a threshold decays; the outcome never does.

    A saturated component has little left to teach, but its rare failures still move the update.
    Penalties (negative weights) and weights of 0 stay.

    Args:
        threshold: A mean above this is saturated, in [0, 1).
        patience: Decisions in a row that the mean must be above it before the weight falls.
        rate: The weight is multiplied by this at every such decision from then on, in (0, 1).
        floor: Least multiple of its initial weight that a component keeps, in [0, 1].
        should_recover: A weight comes back, by 1 / rate at a time, once the mean was at or below
            the threshold for ``patience`` decisions.
    """

    threshold: float = 0.95
    patience: int = 3
    rate: float = 0.8
    floor: float = 0.1
    should_recover: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.threshold < 1, self, "threshold", "give a mean in [0, 1)")
        require(self.patience >= 1, self, "patience", "give 1 or more")
        require(0 < self.rate < 1, self, "rate", "give a factor in (0, 1)")
        require(0 <= self.floor <= 1, self, "floor", "give a multiple in [0, 1]")

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """An undefined mean neither counts nor breaks a streak."""
        outcome = outcome_of(observation)
        before: Mapping[str, int] = state.get("streaks", {})
        streaks: dict[str, int] = dict(before)  # positive: decisions above, negative: not above
        changes: dict[str, float] = {}
        notes: list[str] = []
        for component in observation.components:
            name, streak = component.name, streaks.get(component.name, 0)
            if name == outcome.name or not is_movable(component) or component.initial_weight < 0:
                continue
            if component.mean is None:
                continue
            is_saturated = component.mean > self.threshold
            streak = max(streak, 0) + 1 if is_saturated else min(streak, 0) - 1
            streaks[name] = streak
            ratio = component.weight / component.initial_weight
            if streak >= self.patience and ratio > self.floor:
                new = max(self.floor, ratio * self.rate)
            elif self.should_recover and -streak >= self.patience and ratio < 1:
                new = min(1.0, ratio / self.rate)
            else:
                continue
            changes[name] = new * component.initial_weight
            side = "above" if is_saturated else "not above"
            notes.append(
                f"{name} {component.mean:.2f} {side} {self.threshold:g} for {abs(streak)} "
                f"decisions, weight {component.weight:.3g} to {changes[name]:.3g}"
            )
        reason = "; ".join(notes) or "no component is saturated for long enough"
        return answer(observation, changes, reason=reason, state={"streaks": streaks})
