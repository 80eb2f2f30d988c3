"""Bootstrap intervals of means and of paired differences: over seeds, then over prompts.

Percentile bootstrap: seeds are drawn with replacement, and, for pass rates, then prompts within
each seed (of a rate over n prompts: binomial). Differences are paired by seed; of prompts only the
rates are known, so those are drawn apart, which widens the interval. Below about ten seeds such
intervals are too narrow, so figures show the seeds as well. Every call draws alike: same data, same
interval.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_RESAMPLES = 2_000
TAILS = (0.025, 0.975)


class Interval(NamedTuple):
    """A value between the ends of its interval, from ``n`` seeds."""

    value: float
    low: float
    high: float
    n: int


def mean_interval(values: ArrayLike, counts: ArrayLike | None = None) -> Interval:
    """Mean over seeds; bootstrap over seeds, then prompts where ``counts`` are given.

    Args:
        values: [seeds].
        counts: [seeds] prompts behind each pass rate.
    """
    rates = np.asarray(values, dtype=float)
    draws = seed_draws(len(rates))
    return interval_of(float(rates.mean()), _resampled(rates, counts, draws, stream=1), len(rates))


def difference_interval(
    values: ArrayLike,
    baseline: ArrayLike,
    counts: ArrayLike | None = None,
    baseline_counts: ArrayLike | None = None,
) -> Interval:
    """Mean of ``values - baseline``, paired by seed; arguments as for ``mean_interval``.

    Raises:
        ValueError: Not as many of one as of the other.
    """
    one, other = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    if one.shape != other.shape:
        raise ValueError(f"{len(one)} values and {len(other)} of the baseline: they are no pairs.")
    draws = seed_draws(len(one))
    resampled = _resampled(one, counts, draws, stream=1) - _resampled(
        other, baseline_counts, draws, stream=2
    )
    return interval_of(float((one - other).mean()), resampled, len(one))


def seed_draws(num_seeds: int) -> NDArray[np.int64]:
    """[resamples, seeds] which seeds each resample holds; the same ones at every call."""
    if num_seeds < 1:
        raise ValueError("an interval of no seeds: give at least one.")
    return np.random.default_rng(0).integers(0, num_seeds, (NUM_RESAMPLES, num_seeds))


def _resampled(
    values: NDArray[np.float64], counts: ArrayLike | None, draws: NDArray[np.int64], *, stream: int
) -> NDArray[np.float64]:
    """[resamples] means over the seeds drawn, and over prompts drawn within each."""
    if counts is None:
        return np.asarray(values[draws].mean(axis=1))
    num = np.asarray(counts, dtype=np.int64)[draws]
    rates = np.random.default_rng(stream).binomial(num, np.clip(values, 0.0, 1.0)[draws]) / num
    return np.asarray(rates.mean(axis=1))


def interval_of(value: float, resampled: NDArray[np.float64], n: int) -> Interval:
    low, high = np.quantile(resampled, TAILS)
    return Interval(value, float(low), float(high), n)
