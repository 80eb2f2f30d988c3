"""The third registration: is knowing the damaged linears worth anything, at the rate they need?

Six linears need a higher rate than all 84, so each arm stands at the rate that is best for it, by
the mean over models of its last held-out pass; stage ``planted`` has the lower rates, stage
``oracle`` the higher ones, of the same models.
"""

from __future__ import annotations

import pandas as pd
from paper_figures import study
from paper_figures.intervals import Interval, difference_interval

STAGES = ("planted", "oracle")
ARMS = ("uniform", "oracle", "oracle_of_another")
CONTRASTS = (("oracle", "oracle_of_another"), ("oracle", "uniform"))


def last_passes(results: pd.DataFrame) -> pd.DataFrame:
    """Last evaluations of the three arms, at every rate that either stage ran them at."""
    rows = results[results["stage"].isin(STAGES) & results["arm"].isin(ARMS)]
    return study.last(rows)


def at_best_rate(ends: pd.DataFrame, arm: str) -> pd.DataFrame:
    """An arm's rows at its best rate, by model. Rates that fewer models ran at do not count."""
    own = ends[ends["arm"] == arm]
    models = own.groupby("learning_rate")["seed"].nunique()
    whole = own[own["learning_rate"].isin(models.index[models == models.max()])]
    best = whole.groupby("learning_rate")["held_out"].mean().idxmax()
    return whole[whole["learning_rate"] == best].set_index("seed").sort_index()


def difference(ends: pd.DataFrame, arm: str, control: str) -> Interval:
    """Last held-out pass of ``arm`` minus ``control``'s, paired by model, each at its best rate."""
    one, other = at_best_rate(ends, arm), at_best_rate(ends, control)
    models = one.index.intersection(other.index)
    one, other = one.loc[models], other.loc[models]
    return difference_interval(
        one["held_out"], other["held_out"], one["held_out_n"], other["held_out_n"]
    )
