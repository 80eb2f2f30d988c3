"""The shape of a weight's change dW = W_t - W_0: how many directions, which ones, which entries.

1. a low-rank change is decomposed through its factors by QR, and the [d_out, d_in] matrix is never
   formed for that; a dense one through the Gram matrix of its smaller side, in fp64;
2. two changes are compared by the subspaces of their leading singular vectors, beside the overlap
   that random subspaces of the same size have;
3. "unchanged" always says within what tolerance: bf16 weights hide small changes, so that sparsity
   found in them is partly rounding (2511.08567 on 2505.11711).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tropism.measurements.update_norms import change_factors

TOLERANCES = {"within_0": 0.0, "within_1e_6": 1e-6, "within_1e_5": 1e-5}
"""Names of shares of entries with |dW| <= tolerance, in fp32; 1e-5 is that of 2505.11711."""
UNSEEN = "unseen_in_bf16"
"""Name of the share of entries whose weight is the same before and after once both are bf16."""

_NOTHING = 1e-6
"""Singular values below this part of the largest are rounding, not directions: a Gram matrix in
fp64 of some thousand rows is exact to about 1e-12 of its largest eigenvalue, the root of which it
is."""


@dataclass(frozen=True)
class Change:
    """A change by its singular vectors, those that are rounding left out: r of them, perhaps none.

    Args:
        left: [d_out, r] fp64, orthonormal columns.
        singular: [r] fp64, falling.
        right: [d_in, r] fp64, orthonormal columns.
    """

    left: Float[Tensor, "d_out r"]
    singular: Float[Tensor, " r"]
    right: Float[Tensor, "d_in r"]

    @property
    def norm(self) -> float:
        """||dW||_F."""
        return float(torch.linalg.vector_norm(self.singular))

    @property
    def stable_rank(self) -> float | None:
        """||dW||_F^2 / ||dW||_2^2: 1 where one direction holds all, None where nothing changed."""
        if not len(self.singular):
            return None
        return float((self.singular / self.singular[0]).square().sum())

    def top_share(self, num: int = 1) -> float | None:
        """Part of ||dW||_F^2 in the ``num`` largest directions; 1 / stable rank for one of them."""
        if not len(self.singular):
            return None
        energy = (self.singular / self.singular[0]).square()
        return float(energy[:num].sum() / energy.sum())


def low_rank_change(left: Float[Tensor, "d_out r"], right: Float[Tensor, "r d_in"]) -> Change:
    """The change ``left @ right``, exactly, by QR of both factors.

    With left = Q_L T_L and right^T = Q_R T_R, only T_L T_R^T is decomposed, which is [r, r].
    """
    left_basis, left_triangle = torch.linalg.qr(left.double())
    right_basis, right_triangle = torch.linalg.qr(right.double().mT)
    u, singular, vh = torch.linalg.svd(left_triangle @ right_triangle.mT, full_matrices=False)
    return _kept(left_basis @ u, singular, right_basis @ vh.mT)


def lora_change(
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    a_before: Float[Tensor, "r d_in"],
    b_before: Float[Tensor, "d_out r"],
    scaling: float,
) -> Change:
    """The change scaling (b a - b_before a_before), as one product of rank 2r."""
    left, right = change_factors(a.double(), b.double(), a_before.double(), b_before.double())
    return low_rank_change(scaling * left, right)


def dense_change(change: Float[Tensor, "d_out d_in"]) -> Change:
    """A change that is given whole.

    Its squared singular values are the eigenvalues of the Gram matrix of the smaller side, which is
    much faster than an SVD and, in fp64, as exact for all that is above rounding in fp32.
    """
    whole = change.double()
    is_wide = whole.shape[0] <= whole.shape[1]
    rows = whole if is_wide else whole.mT  # (smaller, larger)
    squares, vectors = torch.linalg.eigh(rows @ rows.mT)
    singular, own = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    kept = singular > _NOTHING * singular[0]
    singular, own = singular[kept], own[:, kept]
    other = rows.mT @ own / singular
    return Change(own, singular, other) if is_wide else Change(other, singular, own)


def _kept(left: Tensor, singular: Tensor, right: Tensor) -> Change:
    kept = singular > _NOTHING * singular.max() if len(singular) else singular > 0
    return Change(left[:, kept], singular[kept], right[:, kept])


@dataclass(frozen=True)
class Overlap:
    """How much of one subspace lies in another of the same size.

    Args:
        k: Directions of each.
        left: ||U_1^T U_2||_F^2 / k of the left singular vectors, in [0, 1].
        right: The same of the right ones.
        left_chance: Its mean for random subspaces, k / d_out.
        right_chance: k / d_in.
    """

    k: int
    left: float
    right: float
    left_chance: float
    right_chance: float


def subspace_overlap(one: Change, other: Change, k: int) -> Overlap | None:
    """Overlap of the leading ``k`` directions, of fewer where a change has fewer; None of none.

    Source: 2106.09685, section 7.2 (normalised Grassmann similarity).
    """
    k = min(k, len(one.singular), len(other.singular))
    if k == 0:
        return None
    left, right = (
        float((mine[:, :k].mT @ theirs[:, :k]).square().sum()) / k
        for mine, theirs in ((one.left, other.left), (one.right, other.right))
    )
    return Overlap(k, left, right, k / one.left.shape[0], k / one.right.shape[0])


def unchanged_shares(
    weight_before: Float[Tensor, "d_out d_in"], change: Float[Tensor, "d_out d_in"]
) -> dict[str, float]:
    """Shares of entries that did not move, by the names of ``TOLERANCES`` and ``UNSEEN``.

    Args:
        weight_before: W_0, in the dtype in which it was loaded.
        change: dW, in fp32.
    """
    size = change.abs()
    shares = {name: float((size <= most).float().mean()) for name, most in TOLERANCES.items()}
    before = weight_before.float()
    seen_after, seen_before = (side.to(torch.bfloat16) for side in (before + change, before))
    return {**shares, UNSEEN: float((seen_after == seen_before).float().mean())}
