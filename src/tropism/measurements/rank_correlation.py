"""Do two rankings of the same linears agree, beyond what unrelated rankings would?

Compared over time, between seeds or between methods: Spearman's correlation and the overlap of the
top 20 %, each beside its chance level, taken from random permutations. "Scalpel vs Hammer"
(2507.10616) reads much into rankings of which two of its own runs agree at 0.30.
Loads no torch, so that figures can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

TOP = 0.2


@dataclass(frozen=True)
class Level:
    """A measure of agreement, and where 95 % of unrelated rankings fall.

    Args:
        value: Of the two rankings.
        chance: Its mean over permutations.
        chance_low: 2.5 % of permutations are below.
        chance_high: 2.5 % are above.
        p: One-sided: share of permutations that agree at least as well, the rankings' own order
            counted as one of them.
    """

    value: float
    chance: float
    chance_low: float
    chance_high: float
    p: float


@dataclass(frozen=True)
class Agreement:
    """Two rankings of ``n`` linears.

    Args:
        n: Linears that both rank.
        correlation: Spearman's; ties share their mean rank. None where one side is all ties.
        overlap: Share of the one's top ``TOP`` that is in the other's.
    """

    n: int
    correlation: Level | None
    overlap: Level


def agreement(
    one: ArrayLike,
    other: ArrayLike,
    *,
    top: float = TOP,
    num_permutations: int = 2_000,
    seed: int = 0,
) -> Agreement:
    """Compare the rankings of the same linears by two sets of values, larger first.

    Args:
        one: [n] finite values.
        other: [n] values of the same linears in the same order.
        top: Part of the linears that counts as the top; at least one does.
        num_permutations: For the chance level and p.
        seed: Of the permutations.

    Raises:
        ValueError: The two are not of one length, fewer than two, or not finite.
    """
    x, y = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 2:
        raise ValueError(
            f"rankings of {x.shape} and {y.shape} values: give two of the same linears, at least 2."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("a ranking holds NaN or infinity: leave those linears out of both.")
    generator = np.random.default_rng(seed)
    shuffled = generator.permuted(np.tile(np.arange(len(x)), (num_permutations, 1)), axis=1)
    ranks_x, ranks_y = _centred_ranks(x), _centred_ranks(y)
    scale = float(np.linalg.norm(ranks_x) * np.linalg.norm(ranks_y))
    correlation = None
    if scale > 0:
        correlation = _level(float(ranks_x @ ranks_y) / scale, ranks_y[shuffled] @ ranks_x / scale)
    num = max(1, round(top * len(x)))
    in_x, in_y = _is_top(x, num), _is_top(y, num)
    overlap = _level(float((in_x & in_y).sum()) / num, in_y[shuffled][:, in_x].sum(axis=1) / num)
    return Agreement(len(x), correlation, overlap)


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    ranks: NDArray[np.float64] = rankdata(values) - (len(values) + 1) / 2
    return ranks


def _is_top(values: NDArray[np.float64], num: int) -> NDArray[np.bool_]:
    """The ``num`` largest; of equal ones the first."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:num]] = True
    return chosen


def _level(value: float, by_chance: NDArray[np.float64]) -> Level:
    at_least = int((by_chance >= value - 1e-12).sum())
    low, high = np.quantile(by_chance, [0.025, 0.975])
    return Level(
        float(value),
        float(by_chance.mean()),
        float(low),
        float(high),
        (at_least + 1) / (len(by_chance) + 1),
    )
