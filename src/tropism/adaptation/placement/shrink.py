"""Step sizes by signal: all-linear stays on, noise takes smaller steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.evidence import Measured
from tropism.adaptation.plans import answer, hold, num_parameters, resolve_rank, train
from tropism.adaptation.scaling import scale_within
from tropism.adaptation.settings import require


@dataclass(frozen=True, kw_only=True)
class SignalShrink(Measured):
    """Learning rates follow the share of signal in each linear's gradient.

    Adam moves a linear whose gradient is noise as far as one whose gradient is signal, and that
    motion costs KL without reward. Here lr_scale_i = clip(c * snr_i / median snr, low, high), with
    c such that the squared updates sum to what they are under uniform scales:
    sum_i lr_scale_i^2 n_i = sum_i n_i, n_i = rank (d_in + d_out) (Adam's step has about the same
    size in every parameter). That median and c only ever appear as their ratio: the median matters
    under ``only_shrink`` alone.

    *Where z < min_site_z* (or undefined) the scale is 1: we cannot tell such a snr from the
    others', so the linear is left as uniform has it. It then meets its own part of the sum, n_i,
    exactly, and the rest is matched, and its median taken, among the other linears alone. A factor
    common to all would pass the shortfall of the known on to the unknown.

    *Clipping and matching* cannot both hold where too few linears have a positive snr: the
    sum cannot reach uniform's even with all of those at ``high`` (they must hold at least
    (1 - low^2) / (high^2 - low^2) of the parameters, a quarter by default). Then clipping wins,
    the step is smaller than uniform's, and ``energy_ratio`` in the decision's value says by how
    much. With snr > 0 everywhere a common factor always exists, as low <= 1 <= high.

    Args:
        low: Smallest scale.
        high: Largest scale.
        min_site_z: Linears below it keep scale 1.
        only_shrink: Scales are min(1, clip(snr / median snr, low, high)), and their sum is not
            matched: half of the known linears take smaller steps and nothing takes larger ones.
        rank: Components of each adapter that train; None for all.
    """

    low: float = 0.25
    high: float = 2.0
    min_site_z: float = 2.0
    only_shrink: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.low <= 1, self, "low", "give a value in (0, 1]")
        require(1 <= self.high < math.inf, self, "high", "give 1 or more")
        require(math.isfinite(self.min_site_z), self, "min_site_z", "give a number")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Scores are the averaged snr, 0 where it is negative."""
        rank = resolve_rank(self.rank, observation)
        evidence = self.gather(observation, state, "snr", "null_z")
        scores = [None if snr is None else max(0.0, snr) for snr in evidence.means["snr"]]
        after = evidence.state
        if evidence.objection is not None:
            return hold(
                observation, evidence.objection, state=after, scores=scores, **evidence.numbers
            )
        known = [
            i
            for i, (snr, z) in enumerate(zip(scores, evidence.site_z, strict=True))
            if snr is not None and z is not None and z >= self.min_site_z
        ]
        ratios = _relative_to_median([scores[i] or 0.0 for i in known])
        if ratios is None:
            lack = "two are needed" if len(known) < 2 else "their median snr is 0"
            reason = (
                f"{evidence.text}, but {len(known)} linears have z >= {self.min_site_z:g}: {lack}"
            )
            return hold(observation, reason, state=after, scores=scores, **evidence.numbers)
        sizes = [float(num_parameters(observation.sites[i], rank)) for i in known]
        scales = dict(zip(known, self._scales(ratios, sizes), strict=True))
        plan = [
            train(site, rank, scales.get(i, 1.0)) if site.can_train else site.plan
            for i, site in enumerate(observation.sites)
        ]
        energy = math.fsum(scales[i] ** 2 * size for i, size in zip(known, sizes, strict=True))
        num_sites = sum(site.can_train for site in observation.sites)
        reason = (
            f"{evidence.text}: step sizes {min(scales.values()):.2f} to "
            f"{max(scales.values()):.2f} at {len(known)} of {num_sites} linears"
        )
        return answer(
            observation,
            plan,
            reason=reason,
            state=after,
            scores=scores,
            energy_ratio=energy / math.fsum(sizes),
            **evidence.numbers,
        )

    def _scales(self, ratios: Sequence[float], sizes: Sequence[float]) -> list[float]:
        if self.only_shrink:
            return [min(1.0, max(self.low, ratio)) for ratio in ratios]
        return scale_within(
            ratios,
            weights=sizes,
            low=[self.low] * len(ratios),
            high=[self.high] * len(ratios),
            total=math.fsum(sizes),
            power=2,
        )


def _relative_to_median(values: Sequence[float]) -> list[float] | None:
    """Values over their median; None for fewer than two, or where the median is 0."""
    median = statistics.median(values) if len(values) >= 2 else 0.0
    return [value / median for value in values] if median > 0 else None
