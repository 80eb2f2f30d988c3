"""Is knowing the damaged linears worth anything, at the learning rate that six linears need?

Planted models of the study's stages 3 and 8: all linears train, only the six damaged ones, or the
six that are damaged in another model. Every rate that an arm ran at.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import arms, study, style
from paper_figures.intervals import mean_interval
from paper_figures.sources import MissingDataError

SOURCE = arms.SOURCE
STAGES = ("planted", "oracle")
LABELS = {
    "uniform": "all 84 linears",
    "oracle": "the 6 damaged linears",
    "oracle_of_another": "6 linears damaged elsewhere",
}


def last_passes(results: pd.DataFrame) -> pd.DataFrame:
    """Last evaluations of the three arms, at every rate that either stage ran them at."""
    return study.last(results[results["stage"].isin(STAGES) & results["arm"].isin(LABELS)])


def collect(source: Path) -> pd.DataFrame:
    """The last held-out pass of every run of the three arms."""
    rows = last_passes(arms.results_of(source))
    if rows.empty:
        raise MissingDataError(f"{SOURCE} has no planted models yet: `{arms.COMMAND}` runs them")
    columns = ["run", "stage", "arm", "learning_rate", "seed", "held_out", "held_out_n"]
    return rows[columns].sort_values(columns[2:5])


def make(csv: Path) -> Figure:
    """Mean over models and its interval, by rate; a line for each arm."""
    data = pd.read_csv(csv)
    figure = style.figure(style.COLUMN, 2.7)
    axes = figure.subplots()
    for i, (arm, label) in enumerate(LABELS.items()):
        shift = 1.04 ** (i - 1)  # else the two sixes hide each other
        points = []
        for rate, own in data[data["arm"] == arm].groupby("learning_rate"):
            mean = mean_interval(own["held_out"], own["held_out_n"])
            axes.errorbar(shift * rate, mean.value, yerr=style.error(*mean[:3]),
                          **style.point(i), label=None if points else label)  # fmt: skip
            points.append((shift * rate, mean.value))
        if points:
            axes.plot(*zip(*points, strict=True), **style.line(i), lw=0.8)
    rates = sorted(set(data["learning_rate"]))
    axes.set(xscale="log", xlabel="learning rate", ylabel="last held-out pass")
    axes.set_xticks(rates, [f"{1000 * rate:g}e-3" for rate in rates])
    axes.minorticks_off()
    axes.set_title(f"{data['seed'].nunique()} models with damage, 95 %")
    style.legend_below(figure, axes, num_columns=1)
    return figure
