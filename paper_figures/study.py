"""Comparisons of the study: at equal held-out reward, at equal seconds, by seed, with intervals.

What is thought fair, and why:

*Equal reward.* Weights and KL go on moving after an arm has stopped getting better, so arms are
compared where their runs *first reach* a held-out level, interpolated between two evaluations. A
lucky evaluation then counts, but for every arm alike: all are evaluated as often, on as many
prompts. An arm has a value at a level only where *all* its seeds reach it; else the level would
keep its lucky seeds alone. Nothing is extrapolated.

*Learning rates.* A smaller rate moves less for the same reward, so each arm stands for its
frontier: at every level the rate with the smallest mean, chosen anew in every resample, so that
the interval knows of the choice; rates that no other arm ran at do not count. Where one rate must
stand for an arm (final scores, equal seconds) it is the one that is best in stage ``choose``, on
other seeds; on a twin that was in no such stage, the one that is best on the *other* seeds.

Intervals are those of ``paper_figures.intervals``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from paper_figures.intervals import (
    Interval,
    difference_interval,
    interval_of,
    mean_interval,
    seed_draws,
)

CELL = ["stage", "twin", "arm", "learning_rate", "group_size", "seed"]


# -- single runs ------------------------------------------------------------------------------


def at_level(held_out: ArrayLike, values: ArrayLike, levels: ArrayLike) -> NDArray[np.float64]:
    """``values`` where ``held_out`` first reaches each level, interpolated; NaN where never.

    Args:
        held_out: [T] in the order of training.
        values: [T], the same evaluations.
        levels: [L].

    Returns:
        [L]; a level at or below the first evaluation has the first value.
    """
    reached, found = np.asarray(held_out, dtype=float), np.asarray(values, dtype=float)
    result = np.full(len(np.atleast_1d(levels)), np.nan)
    for i, level in enumerate(np.atleast_1d(levels)):
        above = np.flatnonzero(reached >= level)
        if not len(above):
            continue
        t = int(above[0])
        if t == 0:
            result[i] = found[0]
            continue
        part = (level - reached[t - 1]) / (reached[t] - reached[t - 1])
        result[i] = found[t - 1] + part * (found[t] - found[t - 1])
    return result


def at_position(positions: ArrayLike, values: ArrayLike, grid: ArrayLike) -> NDArray[np.float64]:
    """``values`` at each point of ``grid``, interpolated; NaN outside of ``positions``.

    Args:
        positions: [T] ascending (seconds, tokens, rollouts).
        values: [T].
        grid: [L].

    Raises:
        ValueError: Positions do not ascend.
    """
    x = np.asarray(positions, dtype=float)
    if (np.diff(x) < 0).any():
        raise ValueError(f"positions {x.tolist()} do not ascend: sort evaluations by rollout.")
    y, points = np.asarray(values, dtype=float), np.asarray(grid, dtype=float)
    return np.asarray(np.interp(points, x, y, left=np.nan, right=np.nan))


# -- tables of one stage and twin ---------------------------------------------------------------


def one_rate(rows: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """``rows``, each arm and group size at one learning rate only.

    Args:
        rows: Of one stage and twin.
        results: The whole table: where an arm has several rates, its rate is the one with the
            best last ``held_out`` in stage ``choose`` of the same twin, means over seeds. A twin
            that has no such stage is ``cross_chosen``.
    """
    tried = last(results[results["stage"] == "choose"])
    kept = []
    for (arm, size), own in rows.groupby(["arm", "group_size"], sort=False):
        rates = sorted(set(own["learning_rate"]))
        if len(rates) > 1:
            is_own = (tried["arm"] == arm) & tried["twin"].isin(own["twin"])
            found = tried[is_own & tried["learning_rate"].isin(rates)]
            found = (
                found[found["group_size"] == size] if size in set(found["group_size"]) else found
            )
            if not len(found):
                kept.append(cross_chosen(own, "arm"))
                continue
            rates = [found.groupby("learning_rate")["held_out"].mean().idxmax()]
        kept.append(own[own["learning_rate"] == rates[0]])
    return pd.concat(kept) if kept else rows


def cross_chosen(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """``rows``, each value of ``by`` and seed at one learning rate: the best one of the others.

    A seed's rate is the one with the best mean last ``held_out`` over the *other* seeds, so that no
    run is chosen for its own luck, and none is spent on choosing alone.
    """
    ends, kept = last(rows), []
    for (value, seed), own in rows.groupby([by, "seed"], sort=False):
        others = ends[(ends[by] == value) & (ends["seed"] != seed)]
        if others.empty:
            others = ends[(ends[by] == value)]
        rate = others.groupby("learning_rate")["held_out"].mean().idxmax()
        kept.append(own[own["learning_rate"] == rate])
    return pd.concat(kept) if kept else rows


def complete_rates(rows: pd.DataFrame) -> list[float]:
    """Learning rates of an arm that no fewer seeds ran at than at its others."""
    seeds = rows.groupby("learning_rate")["seed"].nunique()
    return list(seeds.index[seeds == seeds.max()])


def shared_rates(rows: pd.DataFrame) -> pd.DataFrame:
    """``rows`` at learning rates that more than one arm ran at: no arm has more to choose from."""
    return rows[rows.groupby("learning_rate")["arm"].transform("nunique") > 1]


def last(rows: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every cell."""
    return rows[rows["rollout"] == rows.groupby(CELL)["rollout"].transform("max")]


def unfinished(rows: pd.DataFrame, by: str = "arm") -> dict[Any, str]:
    """Arms that have fewer seeds than others, and how many: ``{"depth": "unfinished, 3 of 5"}``."""
    seeds = rows.groupby(by)["seed"].nunique()
    most = seeds.max()
    return {arm: f"unfinished, {num} of {most}" for arm, num in seeds.items() if num < most}


def contrasts(rows: pd.DataFrame, column: str, baseline: pd.DataFrame) -> pd.DataFrame:
    """Each arm minus ``baseline``, paired by seed: arm, value, low, high, n.

    Args:
        rows: One per arm and seed.
        column: A pass rate if the table has ``<column>_n`` (prompts are then drawn as well).
        baseline: One row per seed.
    """
    count, reference, found = f"{column}_n", baseline.set_index("seed"), []
    for arm, own in rows.groupby("arm", sort=False):
        shared = own.set_index("seed").loc[lambda table: table.index.isin(reference.index)]
        if not len(shared):
            continue
        other = reference.loc[shared.index]
        counts = (shared[count], other[count]) if count in rows else ()
        found.append({"arm": arm, **difference_interval(shared[column], other[column],
                                                                *counts)._asdict()})  # fmt: skip
    return pd.DataFrame(found, columns=["arm", *Interval._fields])


def curves(rows: pd.DataFrame, column: str, by: str, grid: ArrayLike) -> pd.DataFrame:
    """Each arm's mean of ``column`` at every position: arm, ``by``, value, low, high, n.

    A position that not all of an arm's seeds have come to is left out.
    """
    points, found = np.asarray(grid, dtype=float), []
    for arm, own in rows.groupby("arm", sort=False):
        runs = [run for _, run in own.groupby("seed")]
        values = np.array([at_position(run[by], run[column], points) for run in runs])
        counts = [run[f"{column}_n"].iloc[0] for run in runs] if f"{column}_n" in rows else None
        for point, at in zip(points, values.T, strict=True):
            if np.isfinite(at).all():
                found.append({"arm": arm, by: point, **mean_interval(at, counts)._asdict()})
    return pd.DataFrame(found, columns=["arm", by, *Interval._fields])


def at_equal_reward(rows: pd.DataFrame, column: str, levels: ArrayLike) -> pd.DataFrame:
    """Mean of ``column`` where the runs of an arm reach each level: arm, learning_rate, level,
    value, n. A level that not all seeds of that rate reach is left out."""  # fmt: skip
    points, found = np.asarray(levels, dtype=float), []
    for (arm, rate), own in rows.groupby(["arm", "learning_rate"], sort=False):
        values = _reached(own, column, points)
        for level, at in zip(points, values.T, strict=True):
            if np.isfinite(at).all():
                found.append({"arm": arm, "learning_rate": rate, "level": level,
                              "value": at.mean(), "n": len(at)})  # fmt: skip
    return pd.DataFrame(found, columns=["arm", "learning_rate", "level", "value", "n"])


def frontiers(rows: pd.DataFrame, column: str, levels: ArrayLike) -> pd.DataFrame:
    """Each arm's lower frontier over learning rates, with intervals.

    Columns arm, level, learning_rate (the best one there), value, low, high, n. Rates that fewer
    seeds ran at than at the arm's others are left out.
    """
    points, found = np.asarray(levels, dtype=float), []
    for arm, own in rows.groupby("arm", sort=False):
        rates = complete_rates(own)
        values = np.stack(
            [_reached(own[own["learning_rate"] == rate], column, points) for rate in rates]
        )  # (rates, seeds, levels)
        values[~np.isfinite(values).all(axis=1, keepdims=True).repeat(values.shape[1], 1)] = np.inf
        means = values.mean(axis=1)
        resampled = values[:, seed_draws(values.shape[1])].mean(axis=2).min(axis=0)
        for i, level in enumerate(points):
            best = int(means[:, i].argmin())
            if np.isfinite(means[best, i]):
                interval = interval_of(float(means[best, i]), resampled[:, i], values.shape[1])
                found.append({"arm": arm, "level": level, "learning_rate": rates[best],
                              **interval._asdict()})  # fmt: skip
    return pd.DataFrame(found, columns=["arm", "level", "learning_rate", *Interval._fields])


def _reached(rows: pd.DataFrame, column: str, levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """[seeds, levels] of one arm and rate."""
    runs = [run for _, run in rows.groupby("seed")]
    return np.array([at_level(run["held_out"], run[column], levels) for run in runs])
