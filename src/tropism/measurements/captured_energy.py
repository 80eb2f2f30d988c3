"""How much of a gradient a rank-r adapter could follow, from the one-sided sketch Z = Psi^T G.

A fresh adapter (B = 0) moves along G A^T A only. Its share of ||G||^2 is r / d_in for a random A;
with A = the top r right singular vectors it is E_r = sum_{i <= r} sigma_i^2 / ||G||^2, the most
that any A reaches.

A is found from Z, whose rows span about the same space. Its share is judged on rows of Z that did
not take part in finding it, each fold of rows in turn: an unbiased estimate of what that A
captures, hence of a lower bound of E_r. Judging on the same rows finds 0.40 where the truth is
0.05 (a flat spectrum), and the generalised Nystrom approximation
(G Omega)(Psi^T G Omega)^+ (Psi^T G) exceeds 1 there: its square core is ill-conditioned. A power
iteration would need the gradients twice, and they are gone.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

NUM_FOLDS = 4


def captured_energy(sketch: Float[Tensor, "k d_in"], rank: int) -> float | None:
    """Share of ||G||^2 in the best ``rank`` input directions that the sketch can find.

    Args:
        sketch: Psi^T G with independent rows.
        rank: r; above 3/4 k only that many directions are found, and the value is a bound still.

    Returns:
        In [0, 1], or None where the sketch is 0 or too small to be split.

    Raises:
        ValueError: ``rank`` is not positive.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: give at least 1.")
    size = len(sketch)
    products = sketch.double() @ sketch.double().mT  # (k, k): all that is needed
    total = products.trace()
    if size < NUM_FOLDS or not total > 0:
        return None
    captured = torch.zeros((), dtype=torch.float64, device=products.device)
    fold = torch.arange(size, device=products.device) % NUM_FOLDS
    for i in range(NUM_FOLDS):
        finding, judging = fold != i, fold == i
        # Z_f = U S V^T has Z_f Z_f^T = U S^2 U^T, and V^T z = S^-1 U^T Z_f z for a held-out row z.
        squares, left = torch.linalg.eigh(products[finding][:, finding])
        squares, left = squares[-rank:], left[:, -rank:]
        is_real = squares > 1e-10 * squares[-1].clamp_min(torch.finfo(torch.float64).tiny)
        projected = products[judging][:, finding] @ left  # (k / folds, r)
        captured += (projected.square() / squares)[:, is_real].sum()
    return float((captured / total).clamp(0.0, 1.0))


def captured_gain(
    debiased: float | None, *, captured: float | None, rank: int, d_out: int, d_in: int
) -> float | None:
    """Expected decrease of the loss per adapter parameter, up to the step size.

    Args:
        debiased: Squared norm of the signal; negative counts as 0.
        captured: Share of the gradient in the adapter's input directions: r / d_in for a random
            A, E_r for the gradient's own subspace.
        rank: r of the adapter.
        d_out: Rows of the weight.
        d_in: Columns of the weight.

    Returns:
        debiased * captured / (r (d_in + d_out)), None where either is.
    """
    if debiased is None or captured is None:
        return None
    return max(debiased, 0.0) * captured / (rank * (d_in + d_out))
