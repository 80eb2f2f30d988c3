"""Which signal finds linears that were damaged on purpose, and does the policy act on evidence?

From `experiments/planted/run.py`: 6 of 84 linears damaged, seeds 0 to 4. Intervals are a bootstrap
over seeds, too narrow for five: every seed is drawn as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.intervals import mean_interval
from paper_figures.sources import table_of

SOURCE = "experiments/planted/results.csv"
NUM_GROUPS = 24
MIN_Z = 4.0
CONDITIONS = {"decisions": "rewarded", "decisions_shuffled": "shuffled\nrewards"}


def collect(source: Path) -> pd.DataFrame:
    """AUC of every signal at 8, 24 and 48 groups; the z of every reading."""
    rows = pd.read_csv(table_of(source, command="python experiments/planted/run.py"))
    kept = rows[rows["part"].isin(["frozen", *CONDITIONS])]
    return kept.assign(run=[f"planted/{seed}" for seed in kept["seed"]])


def make(csv: Path) -> Figure:
    """Left: all linears; middle: ranks within a kind of module; right: what the policy saw."""
    data = pd.read_csv(csv)
    auc = data[data["part"] == "frozen"]
    figure = style.figure(style.PAGE, 3.2)
    overall, within, evidence = figure.subplots(1, 3, width_ratios=(2, 2, 1.3))
    shown = auc[auc["amount"] == NUM_GROUPS]
    order = list(shown.groupby("name")["value"].mean().sort_values().index)
    for axes, column in ((overall, "value"), (within, "value_within_module")):
        _draw_auc(axes, auc, column, order)
    num = shown["seed"].nunique()
    overall.set_title(f"damaged against whole linears,\n{NUM_GROUPS} groups, {num} seeds, 95 %")
    within.set_title("the same, ranked within\neach kind of module")
    within.set_yticklabels([])
    style.legend_below(figure, overall)
    _draw_evidence(evidence, data[data["name"].isin(["evidence_z", "applied"])])
    return figure


def _draw_auc(axes: Axes, auc: pd.DataFrame, column: str, order: list[str]) -> None:
    for y, name in enumerate(order):
        values = auc[(auc["name"] == name) & (auc["amount"] == NUM_GROUPS)][column].to_numpy()
        mean = mean_interval(values)
        axes.plot(values, np.full(len(values), y), "|", color=style.COLOURS[0], ms=5, alpha=0.8,
                  label="each seed" if y == 0 else None)  # fmt: skip
        axes.errorbar(mean.value, y, xerr=style.error(*mean[:3]), **style.point(0), mfc="white",
                      label=None if y else f"mean, {NUM_GROUPS} groups")  # fmt: skip
    for amount, marker in ((8, "<"), (48, ">")):
        means = auc[auc["amount"] == amount].groupby("name")[column].mean()
        found = [name for name in order if name in means]
        axes.plot(means[found], [order.index(name) for name in found], marker, mfc="none", ms=3.5,
                  color=style.COLOURS[1], label=f"mean, {amount} groups")  # fmt: skip
    axes.axvline(0.5, color="0.5", lw=0.8, ls="--")
    axes.set_yticks(range(len(order)), [name.replace("_", " ") for name in order])
    axes.set(xlim=(0.1, 1.02), ylim=(-0.7, len(order) - 0.3), xlabel="AUC (chance 0.5)")


def _draw_evidence(axes: Axes, rows: pd.DataFrame) -> None:
    for x, part in enumerate(CONDITIONS):
        own = rows[rows["part"] == part]
        z = own[own["name"] == "evidence_z"]
        place = x + (z["seed"] - 2) * 0.13
        axes.plot(place, z["value"], style.MARKERS[x], color=style.COLOURS[x], mfc="none")
        acted = int((own[own["name"] == "applied"]["value"] > 0).sum())
        num = own["seed"].nunique()
        axes.text(x, 6.1, f"acted in\n{acted} of {num} runs", ha="center", va="bottom", fontsize=7)
    axes.axhline(MIN_Z, color="0.5", lw=0.8, ls="--")
    style.categories(axes, list(CONDITIONS.values()))
    axes.set(ylabel=f"z at each reading (acts above {MIN_Z:g})", ylim=(-3, 7.2))
    axes.set_title("default policy, from\ndamaged models")
