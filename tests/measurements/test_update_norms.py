"""Update norms against dense fp64, and the cases in which cheaper formulas fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tropism.measurements import update_norms
from tropism.measurements.update_norms import (
    dense_change_norm,
    lora_change_norm,
    low_rank_norm,
    starting_norm,
)


def factors(
    d_out: int, d_in: int, rank: int, seed: int = 0, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = scale * torch.randn(rank, d_in, generator=generator) / d_in**0.5
    b = scale * torch.randn(d_out, rank, generator=generator) / rank**0.5
    return a, b


def dense_norm(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor, scaling: float) -> float:
    change = b.double() @ a.double() - b0.double() @ a0.double()
    return scaling * float(change.norm())


def trace_norm(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor, scaling: float) -> float:
    """What is not used: ||x||^2 - 2 <x, y> + ||y||^2 by traces of r x r products, in fp32."""

    def inner(b1: Tensor, a1: Tensor, b2: Tensor, a2: Tensor) -> Tensor:
        return ((b1.mT @ b2) * (a1 @ a2.mT)).sum()

    square = inner(b, a, b, a) - 2 * inner(b, a, b0, a0) + inner(b0, a0, b0, a0)
    return scaling * float(square.clamp_min(0).sqrt())


def test_by_hand() -> None:
    # [3, 4]^T [1, 0, 2]: |left| |right| = 5 sqrt(5)
    left, right = torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0, 0.0, 2.0]])
    assert float(low_rank_norm(left, right)) == pytest.approx(5 * 5**0.5)
    zero_a, zero_b = torch.zeros(1, 3), torch.zeros(2, 1)
    assert float(lora_change_norm(right, left, zero_a, zero_b, 0.5)) == pytest.approx(2.5 * 5**0.5)


@pytest.mark.parametrize(
    ("d_out", "d_in", "rank"), [(48, 64, 8), (64, 48, 1), (5, 7, 5), (3, 40, 16), (4, 4, 9)]
)
def test_low_rank_norm_is_the_dense_norm(d_out: int, d_in: int, rank: int) -> None:
    a, b = factors(d_out, d_in, rank)  # the last two have more rank than a dimension
    exact = float((b.double() @ a.double()).norm())
    assert float(low_rank_norm(b, a)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("rank", [1, 8, 40])
def test_change_norm_is_the_dense_norm(rank: int) -> None:
    a0, b0 = factors(32, 24, rank)
    a, b = factors(32, 24, rank, seed=1)
    exact = dense_norm(a, b, a0, b0, 2.0)
    assert float(lora_change_norm(a, b, a0, b0, 2.0)) == pytest.approx(exact, rel=1e-6)
    assert float(lora_change_norm(a0, b0, a, b, 2.0)) == pytest.approx(exact, rel=1e-6)
    assert float(lora_change_norm(a, b, a0, b0, -2.0)) == pytest.approx(exact, rel=1e-6)


def test_small_change_of_a_large_adapter_where_the_trace_formula_fails() -> None:
    a0, b0 = factors(256, 256, 16)
    generator = torch.Generator().manual_seed(2)
    a = a0 + 7.5e-6 * torch.randn(a0.shape, generator=generator)
    b = b0 + 7.5e-6 * torch.randn(b0.shape, generator=generator)
    exact = dense_norm(a, b, a0, b0, 1.0)
    assert 1e-3 < exact < 1e-2
    assert float(lora_change_norm(a, b, a0, b0, 1.0)) == pytest.approx(exact, rel=1e-4)
    wrong = trace_norm(a, b, a0, b0, 1.0)
    assert abs(wrong - exact) > 0.5 * exact


def test_no_change_is_exactly_zero() -> None:
    a, b = factors(16, 12, 4)
    assert float(lora_change_norm(a, b, a, b, 2.0)) == 0.0


def test_change_of_one_factor_is_linear_in_it() -> None:
    a, b = factors(16, 12, 4)
    full = float(lora_change_norm(a, b, a, torch.zeros_like(b), 1.0))
    for share in (1e-1, 1e-3, 1e-6):
        small = float(lora_change_norm(a, share * b, a, torch.zeros_like(b), 1.0))
        assert small == pytest.approx(share * full, rel=1e-5)


def test_rotating_the_factors_changes_nothing() -> None:
    a, b = factors(16, 12, 4)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3))).Q
    total = float(low_rank_norm(b, a))
    assert float(low_rank_norm(b @ rotation, rotation.mT @ a)) == pytest.approx(total, rel=1e-6)
    assert float(lora_change_norm(rotation.mT @ a, b @ rotation, a, b, 1.0)) < 1e-5 * total


def test_bf16_factors_are_measured_in_fp32() -> None:
    a, b = (factor.bfloat16() for factor in factors(64, 64, 8))
    exact = float((b.double() @ a.double()).norm())
    assert float(low_rank_norm(b, a)) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("chunk", [1, 30, 4_000_000])
def test_dense_change_in_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(update_norms, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(9, 8, generator=generator).bfloat16()
    after = (before.float() * 1.01).bfloat16()
    exact = float((after.double() - before.double()).norm())
    assert exact > 0
    assert float(dense_change_norm(after, before)) == pytest.approx(exact, rel=1e-6)


def test_norm_of_the_start_with_an_adapter() -> None:
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    a, b = factors(20, 30, 4)
    exact = float((weight.double() + 2.0 * b.double() @ a.double()).norm())
    assert float(starting_norm(weight, a, b, 2.0)) == pytest.approx(exact, rel=1e-6)
    assert float(starting_norm(weight)) == pytest.approx(float(weight.norm()), rel=1e-6)
    assert float(starting_norm(weight.bfloat16(), a, b, 0.0)) == pytest.approx(
        float(weight.bfloat16().double().norm()), rel=1e-6
    )
