"""Geometry of changes: by hand, against NumPy's SVD, and the LoRA path against the dense one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tropism.measurements.geometry import (
    dense_change,
    lora_change,
    low_rank_change,
    subspace_overlap,
    unchanged_shares,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    # diag(4, 2, 2) in the corner of a 3 x 5 matrix: (16 + 4 + 4) / 16.
    change = torch.zeros(3, 5)
    change[0, 1], change[1, 0], change[2, 4] = 4.0, -2.0, 2.0
    found = dense_change(change)
    assert found.singular.tolist() == pytest.approx([4.0, 2.0, 2.0])
    assert found.norm == pytest.approx(24**0.5)
    assert found.stable_rank == pytest.approx(1.5)
    assert found.top_share() == pytest.approx(16 / 24)
    assert found.top_share(2) == pytest.approx(20 / 24)
    assert found.left[:, 0].abs().tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert found.right[:, 0].abs().tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7)])
def test_dense_equals_numpys_svd(shape: tuple[int, int]) -> None:
    change = random(*shape) * 1e-5
    found = dense_change(change)
    singular = np.linalg.svd(change.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(found.singular, singular, rtol=1e-9)
    assert found.stable_rank == pytest.approx((singular**2).sum() / singular[0] ** 2)
    again = found.left * found.singular @ found.right.mT
    np.testing.assert_allclose(again, change.double(), atol=1e-13)


@pytest.mark.parametrize("start", ["zero", "adapter"])
def test_lora_equals_dense(start: str) -> None:
    a, b = random(3, 20), random(11, 3, seed=1) * 0.01
    a0, b0 = a, torch.zeros(11, 3)
    if start == "adapter":
        a0, b0 = a - 0.01 * random(3, 20, seed=2), b - 1e-3 * random(11, 3, seed=3)
    exact = 2.0 * (b.double() @ a.double() - b0.double() @ a0.double())
    lora, dense = lora_change(a, b, a0, b0, 2.0), dense_change(exact)
    assert len(lora.singular) == len(dense.singular) == (3 if start == "zero" else 6)
    np.testing.assert_allclose(lora.singular, dense.singular, atol=1e-8 * float(lora.singular[0]))
    assert lora.stable_rank == pytest.approx(dense.stable_rank)
    overlap = subspace_overlap(lora, dense, 4)
    assert overlap is not None
    assert (overlap.left, overlap.right) == pytest.approx((1.0, 1.0))


def test_nothing_changed() -> None:
    for found in (
        dense_change(torch.zeros(4, 6)),
        low_rank_change(torch.zeros(4, 2), random(2, 6)),
    ):
        assert found.norm == 0.0
        assert found.stable_rank is None
        assert found.top_share() is None
        assert subspace_overlap(found, dense_change(random(4, 6)), 2) is None


def test_overlap_by_hand_and_by_chance() -> None:
    first, second = torch.zeros(4, 5), torch.zeros(4, 5)
    first[0, 0], first[1, 1] = 3.0, 2.0  # left and right: e0, e1
    second[1, 2], second[0, 0] = 3.0, 2.0  # left: e1, e0; right: e2, e0
    overlap = subspace_overlap(dense_change(first), dense_change(second), 2)
    assert overlap is not None
    assert (overlap.k, overlap.left, overlap.right) == pytest.approx((2, 1.0, 0.5))
    assert (overlap.left_chance, overlap.right_chance) == (0.5, 0.4)
    leading = subspace_overlap(dense_change(first), dense_change(second), 1)
    assert leading is not None
    assert (leading.left, leading.right) == pytest.approx((0.0, 0.0))
    found = [
        subspace_overlap(
            dense_change(random(8, 10, seed=i)), dense_change(random(8, 10, seed=500 + i)), 3
        )
        for i in range(200)
    ]
    assert np.mean([one.left for one in found if one]) == pytest.approx(3 / 8, abs=0.03)
    assert np.mean([one.right for one in found if one]) == pytest.approx(3 / 10, abs=0.03)


def test_shares_of_unchanged_entries() -> None:
    # Beside 1.0 bf16 keeps 2^-7: half of that is rounded away, all of it is not.
    before = torch.tensor([[1.0, 1.0, 1.0, 1e-3]], dtype=torch.bfloat16)
    change = torch.tensor([[0.0, 5e-6, -(2.0**-7), 1e-4]])
    assert unchanged_shares(before, change) == {
        "within_0": 0.25, "within_1e_6": 0.25, "within_1e_5": 0.5, "unseen_in_bf16": 0.5,
    }  # fmt: skip
