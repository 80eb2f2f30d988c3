"""Captured energy against exact singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tropism.measurements.captured_energy import captured_energy, captured_gain
from tropism.measurements.sketches import random_signs

D_OUT, D_IN, SIZE, RANK = 120, 80, 32, 8
INDEX = torch.arange(1, D_IN + 1).double()
SPECTRA = {
    "exponential": torch.exp(-INDEX / 4),
    "1/n": 1 / INDEX,
    "low rank and noise": torch.where(INDEX <= 4, 5.0, 0.5),
    "1/sqrt n": INDEX**-0.5,
    "flat": torch.ones(D_IN).double(),
}


def matrix(spectrum: Tensor) -> Tensor:
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(D_OUT, D_IN).double())
    right, _ = torch.linalg.qr(torch.randn(D_IN, D_IN).double())
    return (left * spectrum) @ right.mT


def estimates(g: Tensor, rank: int) -> Tensor:
    signs = [random_signs(D_OUT, SIZE, seed).double() / SIZE**0.5 for seed in range(40)]
    return torch.tensor([captured_energy((s.mT @ g).float(), rank) for s in signs])


@pytest.mark.parametrize("name", SPECTRA)
def test_close_below_exact(name: str) -> None:
    spectrum = SPECTRA[name]
    energies = spectrum.square()
    exact = float(energies[:RANK].sum() / energies.sum())
    found = estimates(matrix(spectrum), RANK)
    # A lower bound in the mean (4 standard errors of slack), and 0.8 of the truth at least.
    slack = 4 * float(found.std()) / len(found) ** 0.5
    assert float(found.mean()) < exact + slack
    lowest = 0.6 if name == "1/sqrt n" else 0.8
    assert float(found.mean()) > lowest * exact
    assert float(found.std()) < 0.06


def test_unbiased_for_the_subspace_that_is_found() -> None:
    # Flat: whatever subspace is found holds r / d_in, and must not be credited with more.
    found = estimates(matrix(SPECTRA["flat"]), RANK)
    error = float(found.std()) / len(found) ** 0.5
    assert abs(float(found.mean()) - RANK / D_IN) < 4 * error


def test_exact_where_the_rank_is_low() -> None:
    torch.manual_seed(0)
    g = torch.randn(D_OUT, 5) @ torch.randn(5, D_IN)
    sketch = random_signs(D_OUT, SIZE, 0).float().mT @ g
    assert captured_energy(sketch, 5) == pytest.approx(1.0, abs=1e-5)
    assert captured_energy(sketch, 1000) == pytest.approx(1.0, abs=1e-5)
    smaller = captured_energy(sketch, 3)
    assert smaller is not None
    assert smaller < 0.95


def test_undefined_and_refused() -> None:
    assert captured_energy(torch.zeros(8, 5), 2) is None
    assert captured_energy(torch.ones(3, 5), 2) is None
    with pytest.raises(ValueError, match="rank=0"):
        captured_energy(torch.ones(8, 5), 0)


def test_gain_by_hand() -> None:
    shape = {"rank": 2, "d_out": 6, "d_in": 4}
    # A random A captures 2/4 of the energy with 2 (6 + 4) parameters.
    assert captured_gain(8.0, captured=2 / 4, **shape) == pytest.approx(8 * 0.5 / 20)
    assert captured_gain(8.0, captured=0.9, **shape) == pytest.approx(8 * 0.9 / 20)
    assert captured_gain(-8.0, captured=0.9, **shape) == 0.0
    assert captured_gain(None, captured=0.9, **shape) is None
    assert captured_gain(8.0, captured=None, **shape) is None
