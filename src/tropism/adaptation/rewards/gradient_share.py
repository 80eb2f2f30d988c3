"""The outcome keeps its share of the update."""

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
class GradientShare:
    """Other components give way where they drown the outcome's gradient.

    share_k = w_k^2 g_k / sum_j w_j^2 g_j, with g_k the squared gradient norm of component k at
    weight 1 over the linears that now train, averaged over decisions (a negative average counts
    as 0). Cross terms (cosines) are not in it: it is a share of energies, not of the summed update.

    Where the outcome's share is below ``target``, the others' weights are multiplied by one common
    factor of their *initial* values, the largest <= 1 that restores the share: of all ways to
    restore it the one whose largest relative change from the config is smallest. When the others'
    gradients fade, their weights come back. No weight moves by more than ``max_step`` in a
    decision, nor below ``min_factor`` of its initial value or above it; where these bounds bind,
    the others do what is left, and the share may stay short for a while (the reason says so). The
    outcome's own weight never moves.

    Args:
        target: Least share of the outcome, in (0, 1).
        max_step: Largest factor by which a weight changes in one decision, > 1.
        min_factor: Least multiple of its initial weight that a component keeps, in (0, 1].
        tolerance: With the share at or above target, weights that would rise by less than this
            share stay: no chatter.
        smoothing: Weight of earlier decisions in the averages, in [0, 1).
        min_probes: Fewer probes than this decide nothing.
    """

    target: float = 0.5
    max_step: float = 1.5
    min_factor: float = 0.1
    tolerance: float = 0.05
    smoothing: float = 0.5
    min_probes: int = 8

    def __post_init__(self) -> None:
        require(0 < self.target < 1, self, "target", "give a share in (0, 1)")
        require(1 < self.max_step < math.inf, self, "max_step", "give more than 1")
        require(0 < self.min_factor <= 1, self, "min_factor", "give a value in (0, 1]")
        require(0 <= self.tolerance < math.inf, self, "tolerance", "give 0 or more")
        require(0 <= self.smoothing < 1, self, "smoothing", "give a value in [0, 1)")
        require(self.min_probes >= 0, self, "min_probes", "give 0 or more")

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds where the outcome has no gradient: its share is then undefined, or beyond help."""
        outcome = outcome_of(observation)
        if observation.probes_pooled < self.min_probes:
            reason = f"{observation.probes_pooled} probes pooled, {self.min_probes} are needed"
            return hold(observation, reason, state=state)
        norms = {c.name: c.gradient_norm_sq for c in observation.components}
        averages = all_updated(state.get("averages", {}), norms, self.smoothing)
        after = {"averages": averages}
        energies = {name: max(0.0, average[0]) for name, average in averages.items()}
        own = outcome.weight**2 * energies.get(outcome.name, 0.0)
        if norms[outcome.name] is None or own == 0:
            reason = f"the gradient of {outcome.name} is undefined or 0"
            return hold(observation, reason, state=after)
        weighted = {
            c.name: c.weight**2 * energies[c.name]
            for c in observation.components
            if c.name in energies
        }
        total = math.fsum(weighted.values())
        shares = {name: energy / total for name, energy in weighted.items()}
        share = shares[outcome.name]
        others = [
            c
            for c in observation.components
            if c.name != outcome.name and c.name in energies and is_movable(c)
        ]
        now = [c.weight / c.initial_weight for c in others]
        allowed = own * (1 - self.target) / self.target
        wanted = scale_within(
            [1.0] * len(others),
            weights=[c.initial_weight**2 * energies[c.name] for c in others],
            low=[min(1.0, max(self.min_factor, ratio / self.max_step)) for ratio in now],
            high=[max(self.min_factor, min(1.0, ratio * self.max_step)) for ratio in now],
            total=allowed,
            power=2,
        )
        if share >= self.target and all(
            new <= (1 + self.tolerance) * ratio for new, ratio in zip(wanted, now, strict=True)
        ):
            reason = (
                f"{outcome.name} has {share:.0%} of the update energy, at least {self.target:.0%}"
            )
            return hold(observation, reason, state=after, shares=shares)
        changes = {
            c.name: ratio * c.initial_weight for c, ratio in zip(others, wanted, strict=True)
        }
        energy = own + math.fsum(changes[c.name] ** 2 * energies[c.name] for c in others)
        reason = (
            f"{outcome.name} has {share:.0%} of the update energy, target {self.target:.0%}: "
            f"others' weights give it {own / energy:.0%}"
        )
        return answer(observation, changes, reason=reason, state=after, shares=shares)
