"""Step sizes by what each linear's last steps gained: the same gain, from where it costs least."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.evidence import Measured
from tropism.adaptation.plans import answer, hold, resolve_rank, train
from tropism.adaptation.scaling import scale_within
from tropism.adaptation.settings import require


@dataclass(frozen=True, kw_only=True)
class GainSteps(Measured):
    """Learning rates follow the gain of each linear's last moves.

    Steps D_l of all linears add to the objective sum_l g_l, and cost a KL of 1/2 s^T F s where
    s_l scales linear l's step (``measurements/gain.py``). The least KL for a given gain has
    s = F^-1 g up to a factor. F is known poorly (a few dozen completions for all pairs of linears),
    and the inverse of an estimate is worse than none: on fresh completions, the larger the ridge
    F is given the more is saved, up to where it is a multiple of the identity
    (``measurements/ceiling.py``; figure ``ceiling``). What is left is
    s_l = clip(c * g_l, low, high).

    c is such that sum_l s_l g_l = sum_l g_l over the known linears: as much gain as uniform steps,
    so that whatever differs is not the speed. A linear without a gain so far keeps step size 1;
    one whose steps lost takes ``low``.

    Needs ``Pressure.should_measure_gain``. The evidence is the z of all linears' gain. That is a
    sum of products, normal under its null where the debiased energy is skewed, so ``min_z`` is less
    here: 3 lets one of 100 runs of 8 decisions act on no signal.

    Args:
        min_z: The combined z below which the plan is held.
        low: Smallest scale.
        high: Largest scale.
        rank: Components of each adapter that train; None for all.
    """

    min_z: float | None = 3.0
    low: float = 0.25
    high: float = 2.0
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.low <= 1, self, "low", "give a value in (0, 1]")
        require(1 <= self.high < math.inf, self, "high", "give 1 or more")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Scores are the averaged gains, 0 where negative."""
        rank = resolve_rank(self.rank, observation)
        evidence = self.gather(observation, state, "gain", z="gain_z")
        scores = [None if gain is None else max(0.0, gain) for gain in evidence.means["gain"]]
        after, numbers = evidence.state, evidence.numbers
        if evidence.objection is not None:
            return hold(observation, evidence.objection, state=after, scores=scores, **numbers)
        known = [i for i, score in enumerate(scores) if score is not None]
        gains = [scores[i] or 0.0 for i in known]
        if not any(gains):
            reason = f"{evidence.text}, but no linear has gained"
            return hold(observation, reason, state=after, scores=scores, **numbers)
        scales = scale_within(
            gains,
            weights=gains,
            low=[self.low] * len(known),
            high=[self.high] * len(known),
            total=math.fsum(gains),
            power=1,
        )
        by_index = dict(zip(known, scales, strict=True))
        plan = [
            train(site, rank, by_index.get(i, 1.0)) if site.can_train else site.plan
            for i, site in enumerate(observation.sites)
        ]
        reason = (
            f"{evidence.text}: step sizes {min(scales):.2f} to {max(scales):.2f} at {len(known)} "
            f"linears"
        )
        return answer(observation, plan, reason=reason, state=after, scores=scores, **numbers)
