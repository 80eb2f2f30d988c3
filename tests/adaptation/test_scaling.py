"""A common factor under bounds, by hand and on random cases."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tropism.adaptation.scaling import scale_within


def scaled(values: list[float], total: float, **settings: object) -> list[float]:
    count = len(values)
    arguments: dict[str, object] = {
        "weights": [1.0] * count,
        "low": [0.25] * count,
        "high": [2.0] * count,
        "power": 2,
        **settings,
    }
    return scale_within(values, total=total, **arguments)  # type: ignore[arg-type]


def test_without_bounds_in_the_way() -> None:
    # c^2 (0.25 + 1 + 4) = 3
    c = math.sqrt(3 / 5.25)
    assert scaled([0.5, 1.0, 2.0], 3.0) == pytest.approx([0.5 * c, c, 2 * c], rel=1e-12)


def test_clipped_ones_leave_the_rest_to_the_others() -> None:
    # the two small ones stop at 0.25: 2 * 0.0625 + x^2 = 3
    expected = [0.25, 0.25, math.sqrt(2.875)]
    assert scaled([0.1, 1.0, 10.0], 3.0) == pytest.approx(expected, rel=1e-12)
    # one stops at 2 from above: weights 1, 1, 8, so 8 * 4 would be 32; total 40 leaves 8 for two
    result = scaled([1.0, 1.0, 5.0], 40.0, weights=[1.0, 1.0, 8.0])
    assert result == pytest.approx([2.0, 2.0, 2.0], rel=1e-12)
    result = scaled([1.0, 1.0, 5.0], 34.0, weights=[1.0, 1.0, 8.0])
    assert result == pytest.approx([1.0, 1.0, 2.0], rel=1e-12)


def test_power_one_with_bounds_of_each() -> None:
    result = scaled([1.0, 2.0, 3.0], 6.0, power=1, low=[0.0, 0.0, 0.0], high=[9.0, 9.0, 2.0])
    # the third stops at 2; 4 is left for the ratio 1 : 2
    assert result == pytest.approx([4 / 3, 8 / 3, 2.0], rel=1e-12)


@pytest.mark.parametrize(
    ("values", "total", "expected"),
    [
        ([1.0, 1.0], 0.01, [0.25, 0.25]),  # too little: all at the low bound
        ([0.0, 1.0], 9.0, [0.25, 2.0]),  # too much: a value of 0 cannot follow
        ([0.0, 0.0], 2.0, [0.25, 0.25]),
        ([], 1.0, []),
    ],
)
def test_bounds_win(values: list[float], total: float, expected: list[float]) -> None:
    assert scaled(values, total) == expected


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e6), st.floats(1.0, 1e5), st.floats(0.01, 1), st.floats(1, 50)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 2]),
)
def test_total_and_bounds_hold(cases: list[tuple[float, float, float, float]], power: int) -> None:
    values, weights, low, high = (list(column) for column in zip(*cases, strict=True))
    total = math.fsum(weights)  # of ones, which every pair of bounds allows
    result = scale_within(
        values,
        weights=weights,
        low=low,
        high=high,
        total=total,
        power=power,  # type: ignore[arg-type]
    )
    assert all(lo <= x <= hi for lo, x, hi in zip(low, result, high, strict=True))
    reached = math.fsum(w * x**power for w, x in zip(weights, result, strict=True))
    assert reached == pytest.approx(total, rel=1e-9)
    # unclipped ones keep their ratio
    factors = [x / v for v, x, lo, hi in zip(values, result, low, high, strict=True) if lo < x < hi]
    assert factors == pytest.approx(factors[:1] * len(factors), rel=1e-9)
