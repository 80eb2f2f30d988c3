"""Agreement of rankings: by hand, against SciPy, and its chance levels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import hypergeom, spearmanr

from tropism.measurements.rank_correlation import agreement


def test_by_hand() -> None:
    # Ranks 1 2 3 4 5 and 1 2 3 5 4: 1 - 6 * 2 / (5 * 24). Top 40 %: both {3, 4}.
    found = agreement([1, 2, 3, 4, 5], [10, 20, 30, 50, 40], top=0.4)
    assert found.n == 5
    assert found.correlation is not None
    assert found.correlation.value == pytest.approx(0.9)
    assert found.overlap.value == 1.0
    assert agreement([1, 2, 3, 4, 5], [1, 2, 3, 5, 4]).overlap.value == 0.0  # one each


def test_equals_scipy_with_ties() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, 40), generator.integers(0, 6, 40)
    found = agreement(x, y)
    assert found.correlation is not None
    assert found.correlation.value == pytest.approx(spearmanr(x, y).statistic)


def test_chance_levels() -> None:
    generator = np.random.default_rng(1)
    n, top = 84, round(0.2 * 84)
    found = agreement(generator.normal(size=n).tolist(), generator.normal(size=n).tolist())
    level = found.correlation
    assert level is not None
    assert level.chance == pytest.approx(0.0, abs=0.01)
    assert level.chance_high == pytest.approx(1.96 / np.sqrt(n - 1), abs=0.02)
    assert level.chance_low == pytest.approx(-level.chance_high, abs=0.03)
    low, high = hypergeom(n, top, top).interval(0.95)
    assert found.overlap.chance == pytest.approx(top / n, abs=0.01)
    assert (found.overlap.chance_low, found.overlap.chance_high) == pytest.approx(
        (low / top, high / top), abs=1.01 / top
    )


def test_p_is_small_for_a_ranking_and_itself_only() -> None:
    values = np.random.default_rng(2).normal(size=30)
    same, opposite = agreement(values, values), agreement(values, -values)
    assert same.correlation is not None
    assert opposite.correlation is not None
    assert same.correlation.p == same.overlap.p == pytest.approx(1 / 2001)
    assert opposite.correlation.p == 1.0
    assert agreement(values, values) == same


def test_what_cannot_be_compared() -> None:
    assert agreement([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).correlation is None
    with pytest.raises(ValueError, match="give two of the same linears"):
        agreement([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="NaN or infinity"):
        agreement([1.0, float("nan")], [1.0, 2.0])
