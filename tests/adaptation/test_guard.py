"""The guard: each limit, just inside and just outside."""

from __future__ import annotations

from typing import Any

import pytest

from tropism.adaptation.guard import Guard

BEFORE = [
    {"kl": 0.01, "entropy": 1.0, "grad_norm": 0.5},
    {"kl": None, "entropy": 3.0, "grad_norm": None},
    {"kl": 0.02, "entropy": None, "grad_norm": 1.5},
]  # means: entropy 2, gradient norm 1
GUARD = Guard(rollouts=5, max_kl=0.1, entropy_drop=0.5, grad_norm_ratio=4.0)


def now(**values: float | None) -> dict[str, float | None]:
    return {"kl": 0.05, "entropy": 2.0, "grad_norm": 1.0, **values}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kl": 0.1},
        {"entropy": 1.0},
        {"grad_norm": 4.0},
        {"kl": None, "entropy": None, "grad_norm": None},
        {"entropy": 50.0, "grad_norm": 0.0},
    ],
)
def test_within_its_limits(values: dict[str, float | None]) -> None:
    assert GUARD.check(BEFORE, [now(), *[now(**values)] * 8]) is None


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({"kl": 0.11}, ["KL 0.11", "0.1"]),
        ({"entropy": 0.98}, ["2", "0.98", "51%", "50%"]),
        ({"grad_norm": 4.1}, ["1 ", "4.1", "4 times"]),
    ],
)
def test_beyond_a_limit(values: dict[str, Any], numbers: list[str]) -> None:
    reason = GUARD.check(BEFORE, [now(), *[now(**values)] * 8])
    assert reason is not None
    assert all(number in reason for number in [*numbers, "9 rollouts after the switch"])


def test_entropy_is_judged_over_several_rollouts() -> None:
    low = now(entropy=0.1)
    assert GUARD.check(BEFORE, [low] * 7) is None
    assert GUARD.check(BEFORE, [now(entropy=7.4), *[low] * 7]) is None  # mean 1.0125 of 2
    assert GUARD.check(BEFORE, [now(entropy=7.2), *[low] * 7]) is not None
    assert GUARD.check(BEFORE, [now(entropy=99.0), *[low] * 8]) is not None  # long ago


def test_without_a_past_only_kl_is_judged() -> None:
    wild = now(entropy=0.0, grad_norm=1e9)
    assert GUARD.check([], [wild]) is None
    assert GUARD.check([now(entropy=None, grad_norm=None)], [wild]) is None
    assert GUARD.check([], [now(kl=1.0)]) is not None
    assert GUARD.check(BEFORE, []) is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [("rollouts", 0), ("max_kl", 0.0), ("entropy_drop", 1.5), ("grad_norm_ratio", 1.0)],
)
def test_refused_settings(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Guard\.{setting}={value}: give "):
        Guard(**{setting: value})  # type: ignore[arg-type]
