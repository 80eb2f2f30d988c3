"""The third registration: is knowing the damaged linears worth anything, at the rate they need?

Six linears need a higher rate than all 84, so each arm stands at the rate that is best for it, by
the mean over models of its last held-out pass; stage ``planted`` has the lower rates, stage
``oracle`` the higher ones, of the same models.
"""

from __future__ import annotations

import pandas as pd
from paper_figures import study
from paper_figures.fig_positive_control import LABELS, last_passes
from paper_figures.intervals import Interval

__all__ = ["ARMS", "CONTRASTS", "at_best_rate", "difference", "last_passes"]

ARMS = tuple(LABELS)
CONTRASTS = (("oracle", "oracle_of_another"), ("oracle", "uniform"))


def at_best_rate(ends: pd.DataFrame, arm: str) -> pd.DataFrame:
    """An arm's rows at its best rate, by model. Rates that fewer models ran at do not count."""
    own = ends[ends["arm"] == arm]
    whole = own[own["learning_rate"].isin(study.complete_rates(own))]
    best = whole.groupby("learning_rate")["held_out"].mean().idxmax()
    return whole[whole["learning_rate"] == best].sort_values("seed")


def difference(ends: pd.DataFrame, arm: str, control: str) -> Interval:
    """Last held-out pass of ``arm`` minus ``control``'s, paired by model, each at its best rate."""
    baseline = at_best_rate(ends, control)
    (found,) = study.contrasts(at_best_rate(ends, arm), "held_out", baseline).to_dict("records")
    return Interval(*(found[field] for field in Interval._fields))
