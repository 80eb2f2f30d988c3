"""Only the upper layers train, where that buys more pressure per FLOP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.evidence import Measured
from tropism.adaptation.plans import answer, hold, is_training, resolve_rank, retire, train
from tropism.adaptation.settings import require

ADDITIVE = ("debiased", "snr", "captured_gain")
"""Signals whose sum over linears means something; a negative value counts as 0."""


@dataclass(frozen=True, kw_only=True)
class Depth(Measured):
    """All linears of the layers at or above a cut train; the trunk below runs forward once.

    The cut l maximises captured(l) / cost(l):

    - captured(l) = the averaged ``signal`` of the linears at or above l, summed.
    - cost(l) = sum_{j < l} f_j + 2 num_iterations sum_{j >= l} f_j + overhead * cost(0), with
      f_j = sum of d_in d_out over the linears of layer j, the FLOPs of one pass in units of 2 per
      token. A frozen base has no weight gradient, so a backward costs what a forward does, and
      stops at the cut; the trunk's forward is shared by all passes of all iterations. Attention
      scores, the adapters themselves and experts that a token skips are left out.

    With pressure spread evenly the lowest cut wins: the trunk's forward is never saved. Layers
    below the cut become KEEP (OFF where they never trained), and train again if the cut sinks.

    Args:
        signal: ``debiased`` (energy, comparable between linears as gradients of full weights),
            ``snr`` or ``captured_gain``.
        num_iterations: Updates on each rollout batch, as in the objective.
        overhead: Cost that no cut saves (sampling, output head), as a share of an all-layer
            update's cost. The larger, the less a cut saves and the more layers train.
        min_layers: At least so many layers train.
        dwell: Decisions that a cut stays (held ones count).
        hysteresis: Another cut must be better by this share.
        rank: Components of each adapter that train; None for all.
    """

    signal: str = "debiased"
    num_iterations: int = 1
    overhead: float = 0.0
    min_layers: int = 1
    dwell: int = 2
    hysteresis: float = 0.1
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.signal in ADDITIVE, self, "signal", f"choose from {ADDITIVE}")
        require(self.num_iterations >= 1, self, "num_iterations", "give 1 or more")
        require(0 <= self.overhead < math.inf, self, "overhead", "give 0 or more")
        require(self.min_layers >= 1, self, "min_layers", "give 1 or more")
        require(self.dwell >= 0, self, "dwell", "give 0 or more")
        require(0 <= self.hysteresis < math.inf, self, "hysteresis", "give 0 or more")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Scores are the averages of ``signal``, 0 where negative; linears outside layers stay.

        Raises:
            ValueError: The model has fewer than ``min_layers`` layers with adapters.
        """
        rank = resolve_rank(self.rank, observation)
        layers = sorted(
            {s.plan.layer for s in observation.sites if s.can_train and s.plan.layer is not None}
        )
        if len(layers) < self.min_layers:
            raise ValueError(
                f"Depth.min_layers={self.min_layers}: {len(layers)} layers have adapters; give at "
                "most that."
            )
        evidence = self.gather(observation, state, self.signal)
        scores = [None if m is None else max(0.0, m) for m in evidence.means[self.signal]]
        present = min(
            (
                s.plan.layer
                for s in observation.sites
                if s.plan.layer is not None and is_training(s)
            ),
            default=None,
        )
        cut_before, age = state.get("cut", (present, self.dwell))
        age = age + 1 if cut_before == present else 0
        after = {**evidence.state, "cut": [present, age]}
        if evidence.objection is not None:
            return hold(
                observation, evidence.objection, state=after, scores=scores, **evidence.numbers
            )
        if age < self.dwell:
            reason = (
                f"{evidence.text}; layer {present} is the cut for {age} of {self.dwell} decisions"
            )
            return hold(observation, reason, state=after, scores=scores, **evidence.numbers)
        values = self._values(observation, scores, layers)
        candidates = layers[: len(layers) - self.min_layers + 1]
        # Of equal ones the lowest, so that more trains.
        best = max(candidates, key=lambda layer: (values[layer], -layer))
        if values[best] == 0:
            reason = f"{evidence.text}, but no linear has a positive {self.signal}"
            return hold(observation, reason, state=after, scores=scores, **evidence.numbers)
        if present in candidates and values[best] <= (1 + self.hysteresis) * values[present]:
            best = present
        gain = values[best] / values[layers[0]]
        plan = [
            site.plan
            if site.plan.layer is None or not site.can_train
            else train(site, rank)
            if site.plan.layer >= best
            else retire(site, observation)
            for site in observation.sites
        ]
        if best != present:
            after["cut"] = [best, 0]
        reason = (
            f"{evidence.text}: layers {best} to {layers[-1]} train, {gain:.2f} times the pressure "
            "per FLOP of all layers"
        )
        return answer(
            observation,
            plan,
            reason=reason,
            state=after,
            scores=scores,
            cut=best,
            gain=gain,
            **evidence.numbers,
        )

    def _values(
        self,
        observation: PlacementObservation,
        scores: Sequence[float | None],
        layers: Sequence[int],
    ) -> dict[int, float]:
        """Layer -> captured pressure per cost of a cut there."""
        update = 2 * self.num_iterations

        def cost(cut: int) -> int:
            return sum(
                s.d_in * s.d_out * (update if s.plan.layer >= cut else 1)
                for s in observation.sites
                if s.plan.layer is not None
            )

        def captured(cut: int) -> float:
            return math.fsum(
                score
                for site, score in zip(observation.sites, scores, strict=True)
                if score is not None and site.plan.layer is not None and site.plan.layer >= cut
            )

        fixed = self.overhead * cost(layers[0])
        return {layer: captured(layer) / (cost(layer) + fixed) for layer in layers}
