"""Exponential averages over decisions, and the z that such an average has.

An average is a pair [mean, weight_sq] of JSON numbers: weight_sq is the sum of the squared weights
of its terms, hence the variance of the mean of independent terms of variance 1. So z-scores of
separate probes combine (Stouffer's method, weighted as the average is) into mean / sqrt(weight_sq).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Average = Sequence[float]


def updated(average: Average | None, value: float | None, smoothing: float) -> list[float] | None:
    """``average`` with one more term; an undefined value leaves it, the first one starts it.

    Args:
        average: [mean, weight_sq], or None before the first term.
        value: The new term, or None where it is undefined.
        smoothing: Weight of the past, in [0, 1); 0 keeps the last term alone.
    """
    if value is None:
        return None if average is None else list(average)
    if average is None:
        return [float(value), 1.0]
    mean, weight_sq = average
    new = 1.0 - smoothing
    return [smoothing * mean + new * value, smoothing * smoothing * weight_sq + new * new]


def all_updated(
    averages: Mapping[str, Average], values: Mapping[str, float | None], smoothing: float
) -> dict[str, list[float]]:
    """``updated`` for each name; names without a term so far are left out."""
    result = {name: list(average) for name, average in averages.items()}
    for name, value in values.items():
        average = updated(result.get(name), value, smoothing)
        if average is not None:
            result[name] = average
    return result


def mean_of(average: Average | None) -> float | None:
    """The average; None before the first term."""
    return None if average is None else average[0]


def z_of(average: Average | None) -> float | None:
    """Combined z of an average of z-scores; None before the first term."""
    return None if average is None else average[0] / math.sqrt(average[1])
