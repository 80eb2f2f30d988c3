from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tropism.evaluation.statistics import (
    Estimate,
    holm,
    mean_interval,
    paired_permutation_test,
    wilson_interval,
)


def test_wilson_by_hand() -> None:
    # (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.959964, p = 0.8, n = 10
    z, p, n = 1.959963984540054, 0.8, 10
    centre, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = wilson_interval(8, 10)
    assert found.low == pytest.approx((centre - reach) / (1 + z * z / n), abs=1e-12)
    assert found.high == pytest.approx((centre + reach) / (1 + z * z / n), abs=1e-12)
    assert (found.value, found.n) == (0.8, 10)
    assert (round(found.low, 3), round(found.high, 3)) == (0.490, 0.943)  # textbook values


def test_wilson_at_the_edges() -> None:
    none, all_of_them = wilson_interval(0, 128), wilson_interval(128, 128)
    assert none.low == pytest.approx(0.0, abs=1e-12)
    assert none.high == pytest.approx(1.959964**2 / (128 + 1.959964**2), abs=1e-6)
    assert all_of_them.low == pytest.approx(1 - none.high, abs=1e-12)


def test_wilson_narrows_with_n_and_widens_with_confidence() -> None:
    def width(estimate: Estimate) -> float:
        return estimate.high - estimate.low

    assert width(wilson_interval(50, 100)) < width(wilson_interval(5, 10))
    assert width(wilson_interval(5, 10, 0.99)) > width(wilson_interval(5, 10, 0.9))


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
        wilson_interval(successes, n)


def test_t_interval_by_hand() -> None:
    # mean 2, sd 1, n 3: half width t(0.975, 2) / sqrt(3) = 4.302653 / 1.7320508
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.value, found.n) == (2.0, 3)
    assert found.high - 2.0 == pytest.approx(4.302652729911275 / math.sqrt(3), abs=1e-9)
    assert 2.0 - found.low == pytest.approx(found.high - 2.0, abs=1e-12)


def test_clusters_count_once() -> None:
    values = np.repeat([1.0, 2.0, 3.0], 100)
    clusters = np.repeat(["a", "b", "c"], 100)
    assert mean_interval(values, clusters=clusters) == mean_interval([1.0, 2.0, 3.0])
    naive = mean_interval(values, method="bootstrap")
    honest = mean_interval(values, method="bootstrap", clusters=clusters)
    assert honest.n == 3
    assert honest.high - honest.low > 5 * (naive.high - naive.low)


def test_bootstrap_of_two_values_by_hand() -> None:
    # Resamples of (0, 1) have means 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
    found = mean_interval([0.0, 1.0], method="bootstrap", confidence=0.9)
    assert (found.low, found.value, found.high) == (0.0, 0.5, 1.0)
    found = mean_interval([0.0, 1.0], method="bootstrap", confidence=0.3)
    assert (found.low, found.high) == (0.5, 0.5)


def test_bootstrap_weighs_clusters_by_their_size() -> None:
    found = mean_interval([0.0, 0.0, 0.0, 1.0], method="bootstrap", clusters=[0, 0, 0, 1])
    assert found.value == 0.25
    assert (found.low, found.high) == (0.0, 1.0)


def test_bootstrap_obeys_its_seed() -> None:
    values = np.random.default_rng(0).normal(size=50)
    one, same = (mean_interval(values, method="bootstrap", seed=1) for _ in range(2))
    other = mean_interval(values, method="bootstrap", seed=2)
    assert one == same
    assert one != other
    reference = mean_interval(values)
    assert one.low == pytest.approx(reference.low, abs=0.05)
    assert one.high == pytest.approx(reference.high, abs=0.05)


def test_a_constant_has_no_width() -> None:
    for method in ("t", "bootstrap"):
        found = mean_interval([0.5] * 8, method=method)  # type: ignore[arg-type]
        assert (found.low, found.high) == (0.5, 0.5)


def test_intervals_cover_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = mean_interval(rng.normal(loc=1.0, size=5), confidence=0.9)
        hits += found.low <= 1.0 <= found.high
    assert 0.85 < hits / 400 < 0.95


def test_mean_interval_refuses() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        mean_interval([1.0])
    with pytest.raises(ValueError, match="at least 2"):
        mean_interval([1.0, 2.0], clusters=[0, 0])
    with pytest.raises(ValueError, match="NaN"):
        mean_interval([1.0, float("nan")])
    with pytest.raises(ValueError, match=r"confidence=95"):
        mean_interval([1.0, 2.0], confidence=95)
    with pytest.raises(ValueError, match="method='bca'"):
        mean_interval([1.0, 2.0], method="bca")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"clusters has shape \(3,\)"):
        mean_interval([1.0, 2.0], clusters=[0, 1, 2])


def test_permutation_by_hand() -> None:
    # All of four differences are positive: 2 of 2^4 sign patterns are as extreme.
    found = paired_permutation_test([2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0])
    assert found.difference == 2.5
    assert found.p_value == pytest.approx(2 / 16)
    assert found.is_exact
    one_sided = paired_permutation_test([2, 3, 4, 5], [1, 1, 1, 1], alternative="greater")
    assert one_sided.p_value == pytest.approx(1 / 16)
    wrong_side = paired_permutation_test([2, 3, 4, 5], [1, 1, 1, 1], alternative="less")
    assert wrong_side.p_value == 1.0


def test_permutation_equals_enumeration() -> None:
    d = np.array([0.3, -0.1, 0.4, 0.25, -0.05, 0.6, 0.2])
    patterns = np.array(list(itertools.product([-1, 1], repeat=len(d)))) @ d
    expected = (np.abs(patterns) >= d.sum() - 1e-12).mean()
    assert paired_permutation_test(d, np.zeros(7)).p_value == pytest.approx(expected)


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
@pytest.mark.parametrize("n", [2, 5, 12])
def test_permutation_equals_scipy(n: int, alternative: Any) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.normal(0.3, 1.0, n), rng.normal(0.0, 1.0, n)
    found = paired_permutation_test(a, b, alternative=alternative)
    expected = stats.permutation_test(
        (a, b),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
        alternative=alternative,
    )
    assert (found.is_exact, found.num_patterns) == (True, 2**n)
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-12)


def test_wilcoxons_signed_ranks_are_a_permutation_test_of_their_own() -> None:
    # On differences that are signed ranks, the sign-flip test is Wilcoxon's exact one.
    ranks = np.array([1, -2, 3, 4, 5, -6, 7, 8, 9, 10], dtype=float)
    expected = stats.wilcoxon(ranks, method="exact").pvalue
    assert paired_permutation_test(ranks, np.zeros(10)).p_value == pytest.approx(expected)


def test_pairs_without_a_difference_leave_the_test_exact_and_the_same() -> None:
    few = [1.0, 1.0, 1.0, -1.0]
    many = [*few, *([0.0] * 500)]
    alone, among = (paired_permutation_test(d, np.zeros(len(d))) for d in (few, many))
    # The sum is 2: sums of 4 (1), 2 (4), -2 (4) and -4 (1) of 16 are as far out.
    assert alone.p_value == among.p_value == pytest.approx(10 / 16)
    assert (among.is_exact, among.num_patterns, among.n) == (True, 16, 504)
    for alternative, p in (("two-sided", 1.0), ("greater", 0.5), ("less", 1.0)):
        one = paired_permutation_test([1.0, 0.0, 0.0], [0.0] * 3, alternative=alternative)  # type: ignore[arg-type]
        assert (one.p_value, one.num_patterns) == (p, 2)


def test_the_number_of_patterns_is_stated_and_is_what_scipy_draws() -> None:
    rng = np.random.default_rng(3)
    d = rng.choice([-1.0, 1.0], 40, p=[0.3, 0.7])
    found = paired_permutation_test(d, np.zeros(40), num_resamples=999, seed=5)
    assert (found.is_exact, found.num_patterns) == (False, 999)
    # p = (hits + 1) / (999 + 1), of a sum that is binomial
    assert found.p_value * 1000 == pytest.approx(round(found.p_value * 1000))
    expected = stats.binomtest(int((d > 0).sum()), 40).pvalue
    error = math.sqrt(expected * (1 - expected) / 999)
    assert found.p_value == pytest.approx(expected, abs=4 * error + 1e-3)
    extreme = paired_permutation_test(np.ones(40), np.zeros(40), num_resamples=999)
    assert extreme.p_value == pytest.approx(2 / 1000)  # either side counts the pattern observed


def test_signs_of_a_cluster_flip_together() -> None:
    a = np.ones(30)
    found = paired_permutation_test(a, np.zeros(30), clusters=np.repeat([7, 8, 9], 10))
    assert found.n == 3
    assert found.p_value == pytest.approx(2 / 8)


def test_sampled_permutations_come_near_the_exact_ones_and_obey_their_seed() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(0.4, 1.0, 14), np.zeros(14)
    exact = paired_permutation_test(a, b)
    sampled = [paired_permutation_test(a, b, num_resamples=8_000, seed=s) for s in (0, 0, 1)]
    assert exact.is_exact
    assert not sampled[0].is_exact
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0].p_value == pytest.approx(exact.p_value, abs=0.02)


def test_no_difference() -> None:
    assert paired_permutation_test([1.0, 2.0], [1.0, 2.0]).p_value == 1.0


def test_permutation_refuses() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired_permutation_test([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="alternative='larger'"):
        paired_permutation_test([1.0], [1.0], alternative="larger")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        paired_permutation_test([1.0], [0.0])
    with pytest.raises(ValueError, match="shape"):
        paired_permutation_test([], [])


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04, which may not fall.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.9]) == [0.8, 0.9]
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.04]) == [0.04]
    assert holm([]) == []


def test_holm_keeps_the_order_and_depends_on_the_family() -> None:
    values = [0.2, 0.001, 0.05]
    assert np.argsort(holm(values)).tolist() == np.argsort(values).tolist()
    assert holm(values)[1] == pytest.approx(0.003)
    assert holm([*values, 1.0])[1] == pytest.approx(0.004)
    assert all(corrected >= p for corrected, p in zip(holm(values), values, strict=True))


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_probability(value: float) -> None:
    with pytest.raises(ValueError, match="p_values="):
        holm([0.5, value])
