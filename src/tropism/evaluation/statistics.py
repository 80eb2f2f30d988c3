"""Intervals and tests for results: how far a number would move if the run were done again.

Arrays are [num_observations]. Observations that share a cause (completions of one prompt, prompts
of one seed) belong to one cluster: they then count once, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Alternative = Literal["two-sided", "greater", "less"]


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval ``[low, high]``, made from ``n`` independent units."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedTest:
    """Result of ``paired_permutation_test``.

    Args:
        difference: Mean of ``a - b`` over all observations.
        p_value: Probability of a difference at least this extreme if the pairs' labels were
            exchangeable.
        n: Units (clusters, or pairs), those without a difference included.
        is_exact: All sign patterns were counted, not a sample of them.
        num_patterns: So many were: ``2 ** m`` of the m units that differ, or ``num_resamples``.
    """

    difference: float
    p_value: float
    n: int
    is_exact: bool
    num_patterns: int


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a pass rate (Wilson 1927; without continuity correction).

    Raises:
        ValueError: ``n`` is below 1, ``successes`` is not in 0..n, or ``confidence`` not in (0, 1).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes}, n={n}: give 0 <= successes <= n and n >= 1.")
    _check_confidence(confidence)
    interval = stats.binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), int(n))


def mean_interval(
    values: ArrayLike,
    *,
    confidence: float = 0.95,
    method: Literal["t", "bootstrap"] = "t",
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    seed: int = 0,
    num_resamples: int = 10_000,
) -> Estimate:
    """Interval of a mean.

    Args:
        values: [num_observations], finite.
        confidence: In (0, 1).
        method: ``t`` (Student's; of the cluster means, where there are clusters) or ``bootstrap``
            (percentile; clusters are drawn whole, and the value is the mean of all observations).
        clusters: [num_observations] label of the cluster that each observation belongs to.
        seed: Of the bootstrap's ``numpy.random.Generator``.
        num_resamples: Of the bootstrap.

    Raises:
        ValueError: Fewer than two observations or clusters, NaN or infinity, or a bad setting.
    """
    _check_confidence(confidence)
    sums, counts = _cluster_sums(_finite(values, "values"), clusters)
    n = len(sums)
    if n < 2:
        raise ValueError(
            f"mean_interval of {n} independent unit(s): at least 2 are needed; use more seeds or "
            "prompts, or a wilson_interval for a single pass rate."
        )
    if method == "t":
        means = sums / counts
        value, error = float(means.mean()), float(stats.sem(means))
        reach = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
        return Estimate(value, value - reach, value + reach, n)
    if method != "bootstrap":
        raise ValueError(f"method={method!r}: choose `t` or `bootstrap`.")
    result = stats.bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis=axis) / c.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=num_resamples,
        batch=max(1, 1_000_000 // n),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), n)


def paired_permutation_test(
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    alternative: Alternative = "two-sided",
    seed: int = 0,
    num_resamples: int = 65_536,
) -> PairedTest:
    """Sign-flip test of the mean of ``a - b`` (Fisher 1935), exact where that is affordable.

    Units that do not differ have no sign to flip: only the others make patterns.

    Args:
        a: [num_observations], paired with ``b`` (same prompt, same seed).
        b: [num_observations].
        clusters: [num_observations]; the signs of a cluster flip together.
        alternative: ``greater`` means that ``a`` is the larger.
        seed: Of the sampled sign patterns.
        num_resamples: Sampled patterns (p is then at least 1 / (num_resamples + 1), two-sided
            twice that); where there are no more, all are counted instead.

    Raises:
        ValueError: Shapes differ, fewer than two pairs or clusters, NaN or infinity, or an unknown
            alternative.
    """
    first, second = _finite(a, "a"), _finite(b, "b")
    if first.shape != second.shape:
        raise ValueError(f"a has {len(first)} observations and b {len(second)}: they are no pairs.")
    if alternative not in ("two-sided", "greater", "less"):
        raise ValueError(f"alternative={alternative!r}: choose two-sided, greater or less.")
    sums, _ = _cluster_sums(first - second, clusters)
    n = len(sums)
    if n < 2:
        raise ValueError(f"paired_permutation_test of {n} unit(s): at least 2 are needed.")
    moving = sums[sums != 0]
    is_exact = 2 ** len(moving) <= num_resamples
    result = stats.permutation_test(
        (np.pad(moving, (0, max(0, 2 - len(moving)))),),  # scipy wants two; a zero changes no p
        lambda x, axis: x.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf if is_exact else num_resamples,
        batch=max(1, 1_000_000 // n),
        alternative=alternative,
        rng=np.random.default_rng(seed),
    )
    num_patterns = 2 ** len(moving) if is_exact else num_resamples
    difference = float((first - second).mean())
    return PairedTest(difference, float(result.pvalue), n, is_exact, num_patterns)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979) of the p-values of one family, in the order given.

    The smallest is multiplied by their number m, the next by m - 1, and so on; none may fall below
    one before it, or rise above 1. At level alpha the chance of any false alarm is at most alpha,
    however the tests depend on each other.

    Raises:
        ValueError: A value that is no probability.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():  # NaN fails both
        raise ValueError(f"p_values={list(p_values)}: give numbers from 0 to 1.")
    order = np.argsort(values, kind="stable")
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(value) for value in corrected]


def _finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: give one dimension and >= 1 value.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds NaN or infinity: leave out what is undefined.")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: give a value between 0 and 1, such as 0.95.")


def _cluster_sums(
    values: NDArray[np.float64], clusters: Sequence[Any] | NDArray[Any] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and number of observations of each cluster, [num_clusters] each."""
    if clusters is None:
        return values, np.ones_like(values)
    labels = np.asarray(clusters)
    if labels.shape != values.shape:
        raise ValueError(f"clusters has shape {labels.shape}, the values {values.shape}.")
    index = np.unique(labels, return_inverse=True)[1]
    sums = np.bincount(index, weights=values).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)
