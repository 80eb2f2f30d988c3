"""One common factor under bounds: numbers proportional to given values, clipped, of a fixed sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def scale_within(
    values: Sequence[float],
    *,
    weights: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    total: float,
    power: Literal[1, 2],
) -> list[float]:
    """x_i = clip(c * values_i, low_i, high_i) with c such that sum_i weights_i * x_i^power = total.

    The sum grows with c, continuously and in pieces between the points where an x_i meets a bound:
    the piece is found by bisection and c in it in closed form. Where no c reaches the total, the
    bounds win: everything is then at its low bound (total too small), or everything whose value is
    positive at its high one (total too large; a value of 0 stays at the low bound for every c).

    Args:
        values: [N], >= 0.
        weights: [N], >= 0.
        low: [N], >= 0.
        high: [N], >= low.
        total: What the weighted sum is to be.
        power: Exponent in the sum.

    Returns:
        [N].
    """
    bounds = list(zip(values, low, high, strict=True))

    def clipped(factor: float) -> list[float]:
        return [min(max(factor * v, lo), hi) if v > 0 else lo for v, lo, hi in bounds]

    def weighted(numbers: Sequence[float]) -> float:
        return math.fsum(w * x**power for w, x in zip(weights, numbers, strict=True))

    # Beyond the last knot nothing moves any more, before the first one nothing yet.
    knots = sorted({b / v for v, lo, hi in bounds if v > 0 for b in (lo, hi)})
    if not knots or weighted(clipped(knots[0])) >= total:
        return list(low)
    if weighted(clipped(knots[-1])) <= total:
        return [hi if v > 0 else lo for v, lo, hi in bounds]
    below, above = 0, len(knots) - 1
    while above - below > 1:
        middle = (below + above) // 2
        if weighted(clipped(knots[middle])) < total:
            below = middle
        else:
            above = middle
    left, right = knots[below], knots[above]
    is_free = [v > 0 and lo / v <= left and hi / v >= right for v, lo, hi in bounds]
    fixed = [0.0 if free else x for free, x in zip(is_free, clipped(right), strict=True)]
    slope = math.fsum(
        w * v**power for w, v, free in zip(weights, values, is_free, strict=True) if free
    )
    if slope == 0.0:  # only items of weight 0 move here, and the sum is reached by rounding
        return clipped(right)
    factor = (total - weighted(fixed)) / slope
    return clipped(factor if power == 1 else math.sqrt(max(factor, 0.0)))
