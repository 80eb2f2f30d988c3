"""Requested against realised: by hand in bf16, and against torch's own AdamW in fp64."""

from __future__ import annotations

import pytest
import torch

from tropism.measurements.realised_update import StepMeter, requested_update


def adamw(
    *parameters: torch.nn.Parameter, lr: float, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)


def parameter(values: list[float], dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    return weight


def realised(weight: torch.nn.Parameter, *, lr: float, num_steps: int = 1) -> float | None:
    optimizer = adamw(weight, lr=lr)
    meter = StepMeter(optimizer)
    for _ in range(num_steps):
        optimizer.step()
    return meter.detach()


def test_the_request_is_what_torch_does_in_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 7, generator=generator, dtype=torch.float64))
    optimizer = adamw(weight, lr=0.01, weight_decay=0.1)
    for step in range(1, 4):
        weight.grad = torch.randn(5, 7, generator=generator, dtype=torch.float64)
        before = weight.detach().clone()
        optimizer.step()
        state = optimizer.state[weight]
        found = requested_update(
            before,
            first_moment=state["exp_avg"],
            second_moment=state["exp_avg_sq"],
            num_steps=step,
            settings=optimizer.param_groups[0],
        )
        expected = (weight.detach() - before).float()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.fault(23)
def test_bf16_by_hand() -> None:
    # Just below 1 bf16 numbers lie 2^-8 = 0.0039 apart. AdamW's first step is lr * sign(gradient).
    assert realised(parameter([1.0], torch.bfloat16), lr=0.0015) == 0.0
    one_apart = realised(parameter([1.0], torch.bfloat16), lr=0.003)
    assert one_apart == pytest.approx(2**-8 / 0.003, rel=1e-2)
    # One of two is lost: 1 / sqrt(2) of the norm is left.
    half = realised(parameter([1.0, 0.0], torch.bfloat16), lr=0.0015)
    assert half == pytest.approx(0.5**0.5, rel=1e-2)


@pytest.mark.fault(23)
def test_a_rate_of_1e_6_vanishes_in_bf16_and_not_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    values = (0.05 * torch.randn(64, 64, generator=generator)).tolist()
    low = realised(parameter(values, torch.bfloat16), lr=1e-6, num_steps=3)
    assert low is not None
    assert low < 0.2
    assert realised(parameter(values), lr=1e-6, num_steps=3) == pytest.approx(1.0, abs=1e-3)


def test_parameters_are_weighed_by_their_size_and_a_sample_stands_for_all() -> None:
    lost = parameter([1.0] * 900, torch.bfloat16)
    kept = parameter([0.0] * 100, torch.bfloat16)
    for max_elements in (1_000, 50):
        for weight, value in ((lost, 1.0), (kept, 0.0)):
            weight.data.fill_(value)
        optimizer = adamw(lost, kept, lr=0.0015)
        meter = StepMeter(optimizer, max_elements=max_elements)
        optimizer.step()
        assert meter.detach() == pytest.approx(0.1**0.5, rel=1e-2)


def test_nothing_asked_for_is_undefined_and_a_detached_meter_sees_nothing() -> None:
    weight = parameter([1.0])
    assert realised(weight, lr=0.0) is None
    optimizer = adamw(weight, lr=0.1)
    meter = StepMeter(optimizer)
    assert meter.detach() is None
    optimizer.step()
    assert meter.detach() is None
    weight.grad = None
    meter = StepMeter(optimizer)
    optimizer.step()
    assert meter.detach() is None
