"""Whether a weight lies along what it reads and what is asked of it; where not, it does not fit in.

A trained weight is a sum of steps delta x^T, so its strong input directions are those in which its
inputs x vary, and its strong output directions are those in which the gradients delta of its
outputs do. Damage, a bad merge or an untrained module break that, at that linear first of all,
while the gradient of the reward mostly points elsewhere: to wherever reward is gained fastest,
which is seldom where something is broken, since every later linear can make up for it.

The alignment of one side is the correlation between two d x d matrices, with M the covariance of
x (or the second moment of delta) and S = W^T W (or W W^T), both scaled to a mean eigenvalue of 1:

    corr( log(S + eps) , log(M + eps) ),  traces removed

in [-1, 1]. Logarithms, because a few directions hold nearly all of the variance. How large it is
depends on the kind of module (biased up or down by norms and nonlinearities), hardly on the layer,
so a linear is judged against its own module in the other layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tropism.measurements.layer_names import LinearSite
from tropism.measurements.sketches import Measure, SiteGradients

EPSILON = 0.01
"""Of the mean eigenvalue: variances below it count as none."""

MIN_PEERS = 3
"""Other layers with the same module, below which there is nothing to compare with."""


@dataclass
class _Sums:
    inputs: Float64[Tensor, "d_in d_in"]
    input: Float64[Tensor, " d_in"]
    gradients: Float64[Tensor, "d_out d_out"]
    num_tokens: int


class Moments:
    """Sums second moments of inputs and output gradients of every linear, over all probes.

    A ``Measure`` for ``GradientProbe``; it keeps no sequence's gradient. Tokens that nothing flows
    back to, padding among them, are left out.
    """

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """See ``Measure``."""
        return SiteGradients(torch.zeros(num_rows, 0), None)

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """See ``Measure``."""
        received = delta.flatten(0, 1).ne(0).any(dim=1)
        read, asked = x.flatten(0, 1)[received].float(), delta.flatten(0, 1)[received].float()
        new = _Sums(
            (read.mT @ read).double(),
            read.double().sum(dim=0),
            (asked.mT @ asked).double(),
            len(read),
        )
        old = self._sums.get(key)
        if old is not None:
            new.inputs += old.inputs
            new.input += old.input
            new.gradients += old.gradients
            new.num_tokens += old.num_tokens
        self._sums[key] = new
        return SiteGradients(torch.zeros(len(delta), 0), None)

    def inputs(self, key: str) -> Float64[Tensor, "d_in d_in"] | None:
        """Covariance of a linear's inputs; None where no token reached it."""
        sums = self._sums.get(key)
        if sums is None or not sums.num_tokens:
            return None
        mean = sums.input / sums.num_tokens
        return sums.inputs / sums.num_tokens - torch.outer(mean, mean)

    def gradients(self, key: str) -> Float64[Tensor, "d_out d_out"] | None:
        """Second moment of the gradients of a linear's outputs; None where there is none."""
        sums = self._sums.get(key)
        return None if sums is None or not sums.num_tokens else sums.gradients / sums.num_tokens

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All sums, by key of the linear."""
        return {key: dict(vars(sums)) for key, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what ``state_dict`` gave."""
        self._sums = {key: _Sums(**sums) for key, sums in state.items()}


class WithMoments:
    """Another measure, and the moments from the same backward.

    Args:
        measure: What is kept of each sequence.
        moments: Where tokens are summed.
    """

    def __init__(self, measure: Measure, moments: Moments) -> None:
        self.measure, self.moments = measure, moments

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """See ``Measure``."""
        return self.measure.nothing(num_rows, d_out, d_in, is_summed=is_summed)

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """See ``Measure``."""
        self.moments(key, delta, x, None)
        return self.measure(key, delta, x, row_weights)


@dataclass(frozen=True)
class Alignment:
    """How well one weight lies along its surroundings, each in [-1, 1], None where undefined.

    Args:
        inputs: W^T W with the covariance of the inputs.
        outputs: W W^T with the second moment of the outputs' gradients.
    """

    inputs: float | None
    outputs: float | None


def alignment(
    weight: Float[Tensor, "d_out d_in"],
    inputs: Float64[Tensor, "d_in d_in"] | None,
    gradients: Float64[Tensor, "d_out d_out"] | None,
) -> Alignment:
    """Both alignments of one weight; cubic in d_in and d_out, so once in a while, not every step.

    Args:
        weight: W.
        inputs: Covariance of what it reads.
        gradients: Second moment of the gradients of its outputs.
    """
    wide = weight.detach().double()
    return Alignment(
        None if inputs is None else log_correlation(wide.mT @ wide, inputs.to(wide.device)),
        None if gradients is None else log_correlation(wide @ wide.mT, gradients.to(wide.device)),
    )


def log_correlation(one: Float64[Tensor, "d d"], other: Float64[Tensor, "d d"]) -> float | None:
    """Correlation of the logarithms of two positive semi-definite matrices, traces removed.

    1 where they are equal up to a factor, 0 on average where their eigenvectors are unrelated.
    None where either is 0, or a multiple of the identity.
    """
    logs = []
    for matrix in (one, other):
        mean = matrix.trace() / len(matrix)
        if not mean > 0:
            return None
        values, vectors = torch.linalg.eigh(matrix / mean)
        logarithms = (values.clamp_min(0.0) + EPSILON).log()
        logarithms -= logarithms.mean()
        if logarithms.norm() < 1e-9 * math.sqrt(len(matrix)):
            return None
        logs.append((vectors * logarithms) @ vectors.mT)
    return float((logs[0] * logs[1]).sum() / (logs[0].norm() * logs[1].norm()))


def misalignment(
    alignments: Mapping[str, Alignment], sites: Sequence[LinearSite]
) -> tuple[float | None, ...]:
    """How far each linear falls short of its own module in the other layers.

    The median of the other layers minus the linear's own value, in units of the median absolute
    such difference over the layers; the larger one of the two sides. Above about 3, something is
    unlike the rest.

    Args:
        alignments: By key of the linear.
        sites: Every linear.

    Returns:
        One score per site; None outside the layers and with fewer than ``MIN_PEERS`` other layers.
    """
    by_module: dict[str, list[int]] = {}
    for index, site in enumerate(sites):
        if site.layer is not None:
            by_module.setdefault(site.module, []).append(index)
    worst: list[float | None] = [None] * len(sites)
    for peers in by_module.values():
        for side in ("inputs", "outputs"):
            values = {i: getattr(alignments[sites[i].key], side) for i in peers}
            defined = {i: value for i, value in values.items() if value is not None}
            for index, score in _shortfalls(defined).items():
                known = worst[index]
                worst[index] = score if known is None else max(known, score)
    return tuple(worst)


def _shortfalls(values: Mapping[int, float]) -> dict[int, float]:
    if len(values) <= MIN_PEERS:
        return {}
    short = {
        index: float(np.median([other for j, other in values.items() if j != index])) - value
        for index, value in values.items()
    }
    scale = float(np.median(np.abs(list(short.values()))))
    return {i: value / scale for i, value in short.items()} if scale > 0 else {}
