"""Weights that never move: the baseline, and GDPO, which leaves them alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tropism.adaptation.contracts import Decision, PolicyState, RewardObservation
from tropism.adaptation.rewards.weights import hold


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The weights of the config stay."""

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds."""
        return hold(observation, "weights are fixed", state=state)


@dataclass(frozen=True, kw_only=True)
class GDPO:
    """GDPO (2601.05242): each component is normalised before the weighted sum.

    That is how advantages are made, so the objective does it (``aggregation:
    normalize_then_sum``); a component with a small spread then counts as much as one with a large
    one without any weight moving. As a policy GDPO holds the config's weights, and refuses an
    objective that does not do its part: call ``check_objective`` before training.
    """

    AGGREGATION: ClassVar[str] = "normalize_then_sum"

    def check_objective(self, aggregation: str) -> None:
        """Refuse another aggregation than GDPO's.

        Raises:
            ValueError: ``objective.aggregation`` is not ``normalize_then_sum``.
        """
        if aggregation != self.AGGREGATION:
            raise ValueError(
                f"objective.aggregation={aggregation!r} with the reward policy GDPO: set it to "
                f"{self.AGGREGATION!r}, or choose the policy Fixed."
            )

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds."""
        return hold(observation, "GDPO leaves weights to the objective", state=state)
