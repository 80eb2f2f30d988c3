"""The registered comparisons of the study: which rates, which level, which seconds, what differs.

What is compared and why was written in experiments/README.md before the runs; here it is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from paper_figures import study
from paper_figures.intervals import difference_interval

from tropism.evaluation.statistics import holm, paired_permutation_test

CONTRASTS = (
    ("signal_shrink", "uniform"),
    ("signal_shrink", "shrink_shuffled"),
    ("signal_shrink", "shrink_static_average"),
    ("depth", "static_top"),
    ("depth", "uniform"),
    ("top_budget", "rotate"),
    ("top_budget", "replay_other"),
    ("top_budget", "uniform"),
)
REACHED = 0.75
"""Level L: this share of uniform's gain in stage ``choose``."""
HALF_WAY = 0.5
"""The level that takes its place where not all seeds of two compared arms reach it."""
EQUAL_SECONDS = 40
"""Endpoint B: as many seconds as uniform needs for so many rollouts."""


class Rates(NamedTuple):
    """Learning rates of an arm: with the best last held-out pass, and with the least KL at L.

    The second among those at which all seeds reach L; where there is none, it is the first.
    """

    reward: float
    kl: float


def level_at(results: pd.DataFrame, share: float) -> float:
    """A held-out pass so far from the base's to uniform's last one in stage ``choose``."""
    rows = _at_common_rates(results)
    start = rows[rows["rollout"] == 0]["held_out"].mean()
    uniform = study.last(rows[rows["arm"] == "uniform"])
    return float(
        start + share * (uniform.groupby("learning_rate")["held_out"].mean().max() - start)
    )


def _at_common_rates(results: pd.DataFrame) -> pd.DataFrame:
    """Stage ``choose`` at the rates that all arms ran at, so that none has more to choose from."""
    rows = results[results["stage"] == "choose"]
    num_arms = rows["arm"].nunique()
    return rows[rows.groupby("learning_rate")["arm"].transform("nunique") == num_arms]


def chosen_rates(results: pd.DataFrame) -> tuple[float, dict[str, Rates]]:
    """Level L, and each arm's rates, from stage ``choose``."""
    rows, level = _at_common_rates(results), level_at(results, REACHED)
    ends = study.last(rows).groupby(["arm", "learning_rate"])["held_out"].mean()
    best = {arm: ends[arm].idxmax() for arm in rows["arm"].unique()}
    rates = {}
    for arm, own in rows.groupby("arm", sort=False):
        kl = {  # undefined where a seed never reaches L
            rate: reached(run, "kl_in", level).mean(skipna=False)
            for rate, run in own.groupby("learning_rate")
        }
        kl = {rate: value for rate, value in kl.items() if np.isfinite(value)}
        rates[arm] = Rates(best[arm], min(kl, key=lambda rate: kl[rate]) if kl else best[arm])
    return level, rates


def reached(rows: pd.DataFrame, column: str, level: float) -> pd.Series[float]:
    """``column`` where each seed first reaches the level; NaN where one never does.

    Args:
        rows: One arm at one rate.
    """
    return pd.Series(
        {
            seed: study.at_level(run["held_out"], run[column], [level])[0]
            for seed, run in rows.groupby("seed")
        }
    )


def after_seconds(rows: pd.DataFrame, seconds: float) -> pd.Series[float]:
    """Held-out pass of each seed then; a run that was over before has its last one."""
    found = {}
    for seed, run in rows.groupby("seed"):
        until = min(seconds, run["seconds"].iloc[-1])
        found[seed] = study.at_position(run["seconds"], run["held_out"], [until])[0]
    return pd.Series(found)


def primary(results: pd.DataFrame) -> pd.DataFrame:
    """Every registered contrast on both endpoints, from stage ``main``.

    Returns:
        Columns endpoint (A or B), level (of A, else NaN), arm, control, arm_value, control_value
        (means), difference, low, high, n, p, corrected (Holm, over all rows). For A values are of
        log KL, at L, or half way where not all seeds of both arms reach it. A contrast without
        common seeds is left out.
    """
    level, rates = chosen_rates(results)
    rows = results[results["stage"] == "main"]
    found = []
    for arm, control in CONTRASTS:
        if not {arm, control} <= rates.keys():
            continue
        for endpoint in "AB":
            used = level
            table = _pair(rows, (arm, control), endpoint, used, rates)
            if endpoint == "A" and table.isna().any(axis=None):
                used = level_at(results, HALF_WAY)
                table = _pair(rows, (arm, control), endpoint, used, rates)
            table = table.dropna()
            if len(table) < 2:
                continue
            counts = _counts(rows, table.index) if endpoint == "B" else ()
            interval = difference_interval(table["arm"], table["control"], *counts)
            test = paired_permutation_test(table["arm"], table["control"])
            found.append(
                {
                    "endpoint": endpoint,
                    "level": used if endpoint == "A" else np.nan,
                    "arm": arm,
                    "control": control,
                    "arm_value": table["arm"].mean(),
                    "control_value": table["control"].mean(),
                    "difference": interval.value,
                    "low": interval.low,
                    "high": interval.high,
                    "n": interval.n,
                    "p": test.p_value,
                }
            )
    table = pd.DataFrame(found)
    return table.assign(corrected=holm(table["p"].to_list())) if len(table) else table


def _pair(
    rows: pd.DataFrame,
    names: tuple[str, str],
    endpoint: str,
    level: float,
    rates: dict[str, Rates],
) -> pd.DataFrame:
    """Columns arm and control, a row per seed that ran in both."""
    pair = [_values(rows, name, endpoint, level, rates) for name in names]
    return pd.concat(pair, axis=1, keys=["arm", "control"], join="inner")


def _values(
    rows: pd.DataFrame, arm: str, endpoint: str, level: float, rates: dict[str, Rates]
) -> pd.Series[float]:
    own = rows[rows["arm"] == arm]
    if endpoint == "A":
        return np.log(reached(own[own["learning_rate"] == rates[arm].kl], "kl_in", level))
    return after_seconds(own[own["learning_rate"] == rates[arm].reward], seconds_of(rows, rates))


def seconds_of(rows: pd.DataFrame, rates: dict[str, Rates]) -> float:
    """Endpoint B's seconds: the median over uniform's runs at their rate."""
    uniform = rows[(rows["arm"] == "uniform") & (rows["learning_rate"] == rates["uniform"].reward)]
    return float(uniform[uniform["rollout"] == EQUAL_SECONDS]["seconds"].median())


def _counts(rows: pd.DataFrame, seeds: pd.Index[int]) -> tuple[np.ndarray, np.ndarray]:
    counts = np.full(len(seeds), rows["held_out_n"].iloc[0])
    return counts, counts
