"""Small random images of weight gradients that keep norms and inner products in expectation.

A linear's gradient is G = delta^T X, [d_out, d_in]: one row of delta and of X for each token. Its
sketch is (delta Psi)^T (X Omega) = Psi^T G Omega, [k, k], with random Psi [d_out, k] and
Omega [d_in, k]; G itself is never formed. A sketch is linear in G, so sketches of parts add up,
and E<S(G), S(H)> = <G, H>. On a rank-1 G, the worst case, ||S||^2 strays from ||G||^2 by
sqrt((1 + 2/k)^2 - 1), 36 % for k = 32; over gradients of higher rank the errors average out.

Differences from the textbook Gaussian sketch:
1. Entries are +-1/sqrt(k). The variance is never larger than with normal entries, and signs are
   exact in bf16 and the same on every platform.
2. Activations in bf16 are multiplied in bf16 (summed in fp32, as the hardware does) and rounded
   once. That is 0.2 % of an entry, far below the error of any sketch, and spares fp32 copies of
   X and delta. All other types are multiplied in fp32 at least; what follows is in fp32.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int8
from torch import Tensor


class SiteGradients(NamedTuple):
    """What is kept of one linear's gradients.

    Args:
        rows: [m, F] fp32, the image of each sequence's gradient, flattened.
        summed: [k, d_in] fp32, Psi^T G of the weighted sum over the sequences; None: not asked for.
    """

    rows: Float[Tensor, "m F"]
    summed: Float[Tensor, "k d_in"] | None


@runtime_checkable
class Measure(Protocol):
    """Turns what a linear saw into what is kept of its gradients."""

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """The images of zero gradients: of a linear that the loss did not reach."""
        ...

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """The images of ``delta[i]^T x[i]`` of the linear named ``key``."""
        ...


def keyed_bits(*parts: object) -> np.random.Philox:
    """A stream of bits that depends on nothing but ``parts``."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "little"))


def random_signs(size: int, num: int, *parts: object) -> Int8[Tensor, "size num"]:
    """Independent +-1, a pure function of ``parts`` and the shape."""
    words = keyed_bits(*parts).random_raw(-(-size * num // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: size * num]
    return torch.from_numpy(bits.reshape(size, num).astype(np.int8) * 2 - 1)


@dataclass(frozen=True)
class ExactGradients:
    """Keeps each sequence's whole gradient, [d_out * d_in] in fp32: for tests on tiny models."""

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """See ``Measure``."""
        return SiteGradients(torch.zeros(num_rows, d_out * d_in), None)

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """See ``Measure``; nothing is summed here."""
        return SiteGradients(torch.bmm(_full(delta).mT, _full(x)).flatten(1).float(), None)


class Sketch:
    """Sketches every linear with random matrices of its own.

    Args:
        size: k. The error falls as 1/sqrt(k), the cost grows as k.
        seed: The run's seed.
        pool: Which pool the sketches are for: each has new random matrices.

    Raises:
        ValueError: ``size`` is not positive.
    """

    def __init__(self, size: int = 32, *, seed: int = 0, pool: int = 0) -> None:
        if size < 1:
            raise ValueError(f"sketch_size={size}: give at least 1 (32 is usual).")
        self.size = size
        self.seed = seed
        self.pool = pool
        self._signs: dict[tuple[str, str, torch.dtype, torch.device], Tensor] = {}

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """See ``Measure``."""
        summed = torch.zeros(self.size, d_in) if is_summed else None
        return SiteGradients(torch.zeros(num_rows, self.size**2), summed)

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """See ``Measure``."""
        delta, x = _fast(delta), _fast(x)
        left = delta @ self._matrix(key, "output", delta)  # (m, S, k)
        right = x @ self._matrix(key, "input", x)  # (m, S, k)
        rows = torch.bmm(_full(left).mT, _full(right)).flatten(1).float() / self.size
        if row_weights is None:
            return SiteGradients(rows, None)
        weighted = (left * row_weights[:, None, None]).to(x.dtype)
        summed = weighted.flatten(0, 1).mT @ x.flatten(0, 1)  # (k, d_in)
        return SiteGradients(rows, summed.float() / self.size**0.5)

    def _matrix(self, key: str, side: str, like: Tensor) -> Tensor:
        """Signs [features of ``like``, k]; the factor 1/sqrt(k) is applied to the result."""
        place = (key, side, like.dtype, like.device)
        if place not in self._signs:
            signs = random_signs(like.shape[-1], self.size, self.seed, self.pool, key, side)
            self._signs[place] = signs.to(like.device, like.dtype)
        return self._signs[place]


def sketch_cost(shapes: list[tuple[int, int]], size: int, *, is_summed: bool = False) -> float:
    """FLOPs of the sketches over those of a forward and an input-gradient backward.

    Both are counted for the linears alone, for any number of tokens. About
    k (d_in + d_out) / (2 d_in d_out): at k = 32, 5 % for SmolLM2-135M (hidden size 576) and 0.6 %
    for an 8B Llama (4096). Attention, the head, and all rows that are sampled but not probed
    make the share of a whole step much smaller.

    Args:
        shapes: (d_out, d_in) of each linear.
        size: k.
        is_summed: Whether Psi^T G is made as well.
    """
    per_token = sum(
        2 * size * (d_out + d_in + size) + (2 * size * d_in if is_summed else 0)
        for d_out, d_in in shapes
    )
    return per_token / sum(4 * d_out * d_in for d_out, d_in in shapes)


def _fast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bfloat16 else _full(tensor)


def _full(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
