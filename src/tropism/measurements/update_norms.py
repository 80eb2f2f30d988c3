"""How far weights moved: Frobenius norms of changes, exact where the change is tiny.

The textbook route for a low-rank product, ||L R||_F^2 = tr((L^T L)(R R^T)), and any difference of
two squared norms, cancel in fp32: at a relative change of 2e-3 they can return 0. Here a change is
written as one low-rank product whose factors are themselves differences, and its norm is taken by
QR, which is backward stable. A [d_out, d_in] matrix is never formed for LoRA.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

CHUNK_ELEMENTS = 4_000_000


def low_rank_norm(
    left: Float[Tensor, "d_out r"], right: Float[Tensor, "r d_in"]
) -> Float[Tensor, ""]:
    """||left @ right||_F by QR of both factors, in fp32 (fp64 stays fp64); any rank.

    With left = Q_L T_L and right^T = Q_R T_R, orthonormal Q drop out: ||T_L T_R^T||_F.
    """
    left_triangle = torch.linalg.qr(_precise(left), mode="r").R  # (min(d_out, r), r)
    right_triangle = torch.linalg.qr(_precise(right).mT, mode="r").R  # (min(d_in, r), r)
    norm: Tensor = torch.linalg.matrix_norm(left_triangle @ right_triangle.mT)
    return norm


def lora_change_norm(
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    a_before: Float[Tensor, "r d_in"],
    b_before: Float[Tensor, "d_out r"],
    scaling: float,
) -> Float[Tensor, ""]:
    """||scaling (b a - b_before a_before)||_F, with no cancellation between the two products."""
    factors = change_factors(*map(_precise, (a, b, a_before, b_before)))
    return abs(scaling) * low_rank_norm(*factors)


def change_factors(
    a: Float[Tensor, "r d_in"],
    b: Float[Tensor, "d_out r"],
    a_before: Float[Tensor, "r d_in"],
    b_before: Float[Tensor, "d_out r"],
) -> tuple[Float[Tensor, "d_out 2*r"], Float[Tensor, "2*r d_in"]]:
    """Left and right of b a - b_before a_before as one product of rank 2r.

    b a - b0 a0 = (b - b0) a + b0 (a - a0) = [b - b0, b0] [a; a - a0]: the factors are small where
    the change is small. In the dtype of what is given.
    """
    left = torch.cat([b - b_before, b_before], dim=1)
    right = torch.cat([a, a - a_before], dim=0)
    return left, right


def dense_change_norm(
    weight: Float[Tensor, "d_out d_in"], weight_before: Float[Tensor, "d_out d_in"]
) -> Float[Tensor, ""]:
    """||weight - weight_before||_F by direct subtraction in fp32, some rows at a time.

    ``weight_before`` may live on another device (a copy in CPU memory): only the rows in work are
    moved. The result is on ``weight``'s device.
    """
    rows = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    norms = [
        torch.linalg.vector_norm(_precise(now) - _precise(before.to(now.device)))
        for now, before in zip(weight.split(rows), weight_before.split(rows), strict=True)
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def starting_norm(
    weight: Float[Tensor, "d_out d_in"],
    a: Float[Tensor, "r d_in"] | None = None,
    b: Float[Tensor, "d_out r"] | None = None,
    scaling: float = 1.0,
) -> Float[Tensor, ""]:
    """||weight + scaling b a||_F: the norm of the starting policy's weight, W_0.

    Expanded as ||W||^2 + 2 s <b^T W, a> + s^2 ||b a||^2. An adapter is small beside its base, so
    nothing cancels here; without an adapter it is the plain norm.
    """
    norm = dense_change_norm(weight, torch.zeros((), dtype=weight.dtype).expand_as(weight))
    if a is None or b is None:
        return norm
    a, b = _precise(a).to(weight.device), _precise(b).to(weight.device)
    cross = ((b.mT @ _precise(weight)) * a).sum()
    square = norm.square() + 2 * scaling * cross + (scaling * low_rank_norm(b, a)).square()
    return square.clamp_min(0.0).sqrt()


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
