"""Gradient pressure: how strongly, and how surely, the reward pulls at every linear.

Differences from taking norms of gradients:
1. raw norms are nearly all noise, so the signal is taken across prompts (``debiased``), with a
   permutation null beside it;
2. one Gram matrix of single sequences' gradients at unit advantage gives every statistic, so that
   each reward component and each permutation of the advantages comes from the same backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tropism.measurements import pressure_statistics as statistics
from tropism.measurements.captured_energy import captured_gain
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.records import TABLES


@dataclass(frozen=True)
class SitePressure:
    """One linear. Every number is None where it is undefined.

    Args:
        layer: Decoder layer, None outside the layers.
        module: Label of the linear within its layer.
        raw_sq: Mean squared norm of a prompt's gradient, signal and noise.
        debiased_sq: Squared norm of the signal, unbiased: negative where there is none to see.
        null_z: Standard deviations of ``debiased_sq`` above its permutation null.
        consistency: Mean cosine of successive probes' gradients.
        captured_energy: Share of the gradient in the best ``rank`` input directions.
        probes_pooled: Probes behind the numbers.
        snr: Signal's share of the raw energy, in [0, 1] up to noise; a negative signal counts as 0.
        noise_scale: Prompts at which signal equals noise.
        captured_gain: Expected decrease of the loss per adapter parameter, up to the step size.
    """

    layer: int | None
    module: str
    raw_sq: float | None
    debiased_sq: float | None
    null_z: float | None
    consistency: float | None
    captured_energy: float | None
    probes_pooled: int
    snr: float | None
    noise_scale: float | None
    captured_gain: float | None

    def record(self) -> dict[str, Any]:
        """A row of the ``pressure`` table."""
        return {column: getattr(self, column) for column in TABLES["pressure"]}

    def signals(self) -> dict[str, float | None]:
        """What placement policies read, under the names they use."""
        return {
            "raw": self.raw_sq,
            "debiased": self.debiased_sq,
            "snr": self.snr,
            "consistency": self.consistency,
            "captured_gain": self.captured_gain,
        }


@dataclass(frozen=True)
class PressureEstimate:
    """All linears at once.

    Args:
        sites: Every linear, in the order of the pool's.
        pooled_z: z of ``debiased_sq`` summed over all linears, each in units of its own energy.
        noise_scale: Prompts at which signal equals noise, all linears taken as one gradient and
            groups as they were probed (see ``choose_probe_rows`` for what that means for whole
            groups).
        probes_pooled: Probes behind the numbers.
        num_prompts: Prompts behind the numbers.
    """

    sites: tuple[SitePressure, ...]
    pooled_z: float | None
    noise_scale: float | None
    probes_pooled: int
    num_prompts: int


def estimate_pressure(
    gram: Float64[Tensor, "sites N N"],
    *,
    advantages: Float64[Tensor, " N"],
    prompts: Int[Tensor, " N"],
    probes: Int[Tensor, " N"],
    sites: Sequence[LinearSite],
    shapes: Sequence[tuple[int, int]],
    rank: int,
    captured: Sequence[float | None],
    is_gradient_subspace: bool,
    num_permutations: int,
    rng: np.random.Generator,
) -> PressureEstimate:
    """Every statistic at every linear.

    Args:
        gram: Inner products of the sequences' gradients at unit advantage.
        advantages: Of the sequences.
        prompts: Which prompt each sequence answers.
        probes: Which probe each sequence belongs to; later probes have higher numbers.
        sites: The linears.
        shapes: (d_out, d_in) of each.
        rank: r, for the captured gain.
        captured: Captured energy of each, where it was measured.
        is_gradient_subspace: Whether adapters start in the gradient's subspace, so that they
            capture that; else in a random one.
        num_permutations: Of the null.
        rng: Draws them.
    """
    raw = statistics.raw_energy(gram, advantages[None], prompts)[:, 0]
    debiased = statistics.debiased_energy(gram, advantages[None], prompts)[:, 0]
    if not advantages.any():  # no signal is not the same as a signal of 0
        raw, debiased = torch.full_like(raw, math.nan), torch.full_like(debiased, math.nan)
    z, pooled_z = statistics.null_z(
        gram, advantages, prompts, num_permutations=num_permutations, rng=rng
    )
    cosines = statistics.consistency(gram, advantages, probes)
    num_probes, num_prompts = len(probes.unique()), len(prompts.unique())
    found = []
    for i, (site, (d_out, d_in)) in enumerate(zip(sites, shapes, strict=True)):
        raw_sq, debiased_sq = _defined(raw[i]), _defined(debiased[i])
        share = captured[i] if is_gradient_subspace else rank / d_in
        found.append(
            SitePressure(
                layer=site.layer,
                module=site.module,
                raw_sq=raw_sq,
                debiased_sq=debiased_sq,
                null_z=_defined(z[i]),
                consistency=_defined(cosines[i]),
                captured_energy=captured[i],
                probes_pooled=num_probes,
                snr=statistics.signal_share(raw_sq, debiased_sq),
                noise_scale=statistics.noise_scale(raw_sq, debiased_sq),
                captured_gain=captured_gain(
                    debiased_sq, captured=share, rank=rank, d_out=d_out, d_in=d_in
                ),
            )
        )
    return PressureEstimate(
        sites=tuple(found),
        pooled_z=_defined(pooled_z),
        noise_scale=statistics.noise_scale(_defined(raw.sum()), _defined(debiased.sum())),
        probes_pooled=num_probes,
        num_prompts=num_prompts,
    )


def _defined(value: Float64[Tensor, ""] | float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
