"""The second registration: KL at a level beside uniform's line of KL over rollouts to the level.

An arm that learns faster pays more KL for the same reward, whatever it trains, and so does a larger
rate. So arms are compared with uniform *at as many rollouts*: log KL where a run first reaches the
level, minus the straight line of log KL on log rollouts over uniform's rates. One slope holds for
all seeds, and a height for each.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from experiments.study import contrasts
from paper_figures.intervals import difference_interval

from tropism.evaluation.statistics import holm, paired_permutation_test

STAGE = "gain"
SEEDS = 8
"""As registered; with fewer the stage is unfinished."""
CONTRASTS = (
    ("gain_steps", "uniform"),
    ("gain_steps", "gain_shuffled"),
    ("gain_steps", "gain_average"),
    ("static_top", "uniform"),
)


def at_level(rows: pd.DataFrame, level: float) -> pd.DataFrame:
    """Log KL and log rollouts where each run first reaches the level; NaN where it never does.

    Returns:
        Columns arm, learning_rate, seed, kl, rollouts.
    """
    found = []
    for (arm, rate), own in rows.groupby(["arm", "learning_rate"], sort=False):
        kl, rollouts = (contrasts.reached(own, name, level) for name in ("kl_in", "rollout"))
        found.append(
            pd.DataFrame({"arm": arm, "learning_rate": rate, "kl": kl, "rollouts": rollouts})
            .rename_axis("seed")
            .reset_index()
        )
    table = pd.concat(found, ignore_index=True)
    return table.assign(kl=np.log(table["kl"]), rollouts=np.log(table["rollouts"]))


def beside_uniform(rows: pd.DataFrame, level: float) -> pd.DataFrame:
    """Each arm's log KL above uniform's line, mean over its rates; NaN where a run never arrives.

    Returns:
        A row per seed, a column per arm; uniform's is 0 by construction.
    """
    table = at_level(rows, level)
    line = table[table["arm"] == "uniform"].dropna()
    centred = line[["kl", "rollouts"]] - line.groupby("seed")[["kl", "rollouts"]].transform("mean")
    slope = (centred["kl"] * centred["rollouts"]).sum() / centred["rollouts"].pow(2).sum()
    heights = (line["kl"] - slope * line["rollouts"]).groupby(line["seed"]).mean()
    above = table["kl"] - slope * table["rollouts"] - table["seed"].map(heights)
    is_uniform = table["arm"] == "uniform"
    whole = above.groupby([table["seed"], table["arm"]]).agg(lambda own: own.mean(skipna=False))
    return whole.unstack("arm").assign(
        uniform=above[is_uniform].groupby(table["seed"]).mean()
    )  # its slow runs that never arrive are left out of the line


def primary(results: pd.DataFrame) -> pd.DataFrame:
    """Every registered contrast of the stage.

    Returns:
        Columns level, arm, control, difference (of log KL), low, high, n, p, corrected (Holm).
    """
    rows = results[results["stage"] == STAGE]
    levels = [contrasts.level_at(results, share) for share in
              (contrasts.REACHED, contrasts.HALF_WAY)]  # fmt: skip
    found = []
    for arm, control in CONTRASTS:
        for level in levels:
            pair = beside_uniform(rows, level).reindex(columns=[arm, control])
            if level == levels[-1] or not pair.isna().any(axis=None):
                break
        pair = pair.dropna()
        if len(pair) < 2:
            continue
        interval = difference_interval(pair[arm], pair[control])
        p = paired_permutation_test(pair[arm], pair[control]).p_value
        found.append(
            {"level": level, "arm": arm, "control": control, "difference": interval.value,
             "low": interval.low, "high": interval.high, "n": interval.n, "p": p}
        )  # fmt: skip
    table = pd.DataFrame(found)
    return table.assign(corrected=holm(table["p"].to_list())) if len(table) else table
