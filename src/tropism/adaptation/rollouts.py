"""Policies that decide how many prompts and completions a rollout batch has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PolicyState, RolloutObservation
from tropism.adaptation.settings import require
from tropism.adaptation.smoothing import updated


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The sizes of the config stay."""

    def decide(
        self, observation: RolloutObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds."""
        return _hold(observation, "rollout sizes are fixed", dict(state))


@dataclass(frozen=True, kw_only=True)
class CriticalGroups:
    """As many groups per update as make its signal equal its noise.

    Below the gradient noise scale (1812.06162, in groups) an update is mostly noise, and more
    groups improve it almost in proportion; far above it they are spent for little. The noise scale
    is averaged over decisions as its inverse, the signal share of a group's gradient: near no
    signal the scale itself runs to infinity.

    Args:
        min_groups: Bounds of the groups per rollout batch ...
        max_groups: ... that it decides.
        multiple: Groups wanted per noise scale: 1 spends up to where signal equals noise.
        max_step: Largest factor by which the number of groups changes in one decision, > 1.
        tolerance: Smaller relative changes of the wanted number are not made.
        equal_samples: Keep the samples per rollout batch: the group size changes against the
            number of groups, to the allowed one that comes nearest to the wanted number.
        group_sizes: Allowed group sizes, under ``equal_samples``.
        smoothing: Weight of earlier decisions in the average, in [0, 1).
        min_probes: Fewer probes than this decide nothing.
    """

    min_groups: int = 2
    max_groups: int = 64
    multiple: float = 1.0
    max_step: float = 2.0
    tolerance: float = 0.1
    equal_samples: bool = False
    group_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
    smoothing: float = 0.5
    min_probes: int = 8

    def __post_init__(self) -> None:
        require(self.min_groups >= 1, self, "min_groups", "give 1 or more")
        is_ordered = self.max_groups >= self.min_groups
        require(is_ordered, self, "max_groups", f"give min_groups={self.min_groups} or more")
        require(0 < self.multiple < math.inf, self, "multiple", "give more than 0")
        require(1 < self.max_step < math.inf, self, "max_step", "give more than 1")
        require(0 <= self.tolerance < math.inf, self, "tolerance", "give 0 or more")
        is_allowed = len(self.group_sizes) > 0 and min(self.group_sizes) >= 2
        require(is_allowed, self, "group_sizes", "name sizes of 2 or more; one has no advantage")
        require(0 <= self.smoothing < 1, self, "smoothing", "give a value in [0, 1)")
        require(self.min_probes >= 0, self, "min_probes", "give 0 or more")

    def decide(
        self, observation: RolloutObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds where the noise scale is undefined."""
        if observation.probes_pooled < self.min_probes:
            reason = f"{observation.probes_pooled} probes pooled, {self.min_probes} are needed"
            return _hold(observation, reason, dict(state))
        scale = observation.noise_scale
        signal = None if scale is None or scale <= 0 else 1.0 / scale
        average = updated(state.get("average"), signal, self.smoothing)
        after = {"average": average}
        if signal is None or average is None:
            return _hold(observation, "the noise scale is undefined", after)
        wanted = self.multiple / average[0]
        text = f"noise scale {scale:.1f} groups, {wanted:.1f} wanted"
        now = observation.num_groups
        low = max(float(self.min_groups), now / self.max_step)
        high = min(float(self.max_groups), now * self.max_step)
        bounded = max(min(wanted, high), min(low, self.max_groups))
        if abs(bounded - now) <= self.tolerance * now:
            return _hold(observation, f"{text}, {now} taken", after)
        size = observation.group_size
        num_groups = max(self.min_groups, min(self.max_groups, round(bounded)))
        if self.equal_samples:
            num_groups, size = self._nearest(observation, wanted, low, high)
        if num_groups == now:
            return _hold(observation, f"{text}, {now} are the nearest allowed", after)
        reason = f"{text}: {now} x {observation.group_size} becomes {num_groups} x {size}"
        value = {"num_groups": num_groups, "group_size": size}
        return Decision("apply", reason, value, scores=(), state=after)

    def _nearest(
        self, observation: RolloutObservation, wanted: float, low: float, high: float
    ) -> tuple[int, int]:
        """(groups, group size) of the same number of samples, nearest to ``wanted`` in ratio."""
        num_samples = observation.num_groups * observation.group_size
        present = (observation.num_groups, observation.group_size)
        allowed = [present] + [
            (num_samples // size, size)
            for size in sorted(set(self.group_sizes), reverse=True)
            if num_samples % size == 0 and low <= num_samples // size <= high
        ]
        return min(allowed, key=lambda pair: max(pair[0] / wanted, wanted / pair[0]))


def _hold(observation: RolloutObservation, reason: str, state: PolicyState) -> Decision:
    value = {"num_groups": observation.num_groups, "group_size": observation.group_size}
    return Decision("hold", reason, value, scores=(), state=state)
