"""How much KL could any step sizes by linear save at equal gain, on prompts they have not seen?

From the moves of uniform runs (`experiments/study/ceiling.yaml`): what the last update of each
linear does to completions of the next rollout. Sizes are proposed from half of the prompts and
judged on the other half; 1 is uniform. Most of an update's KL belongs to no linear alone (right).
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

SOURCE = "experiments/study/ceiling/results.csv"
LABELS = {"ridge 0.1": "least KL, ridge 0.1", "ridge 1": "ridge 1", "ridge 10": "ridge 10",
          "by gain": "in proportion to gain", "by gain, shuffled": "the same at other linears",
          "top third": "top third only"}  # fmt: skip


def collect(source: Path) -> pd.DataFrame:
    """Ratios of each seed and reading, with the run's name."""
    command = "python experiments/sweep.py experiments/study/ceiling.yaml"
    rows = pd.read_csv(table_of(source, command=command))
    name = rows["arm"] + "/seed=" + rows["seed"].astype(str)
    rows = rows.assign(run="ceiling/" + name + "@" + rows["commit"].astype(str))
    return rows[["run", "seed", "rollout", "steps", "kl_ratio", "shared_kl"]]


def make(csv: Path) -> Figure:
    """Left: KL over uniform's for each way of choosing step sizes; right: what linears share."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.8)
    ratios, shared = figure.subplots(1, 2, width_ratios=(5, 2))
    readings = sorted(set(data["rollout"]))
    _draw_ratios(ratios, data, readings)
    once = data.drop_duplicates(["seed", "rollout"])
    for x, rollout in enumerate(readings):
        own = once[once["rollout"] == rollout]["shared_kl"]
        shared.plot(np.full(len(own), x - 0.15), own, "_", color="0.55", ms=5)
        interval = mean_interval(own)
        shared.errorbar(x + 0.1, interval.value, **style.point(0),
                        yerr=style.error(*interval[:3]))  # fmt: skip
    shared.set_ylim(0, 1)
    shared.set_ylabel("part of KL that linears share")
    style.categories(shared, [_span(readings, x) for x in range(len(readings))])
    shared.set_xlabel("rollouts")
    style.legend_below(figure, ratios, num_columns=3)
    return figure


def _draw_ratios(axes: Axes, data: pd.DataFrame, readings: list[int]) -> None:
    names = [name for name in LABELS if name in set(data["steps"])]
    axes.axhline(1, color="0.6", lw=0.8)
    for i, name in enumerate(names):
        for x, rollout in enumerate(readings):
            own = data[(data["steps"] == name) & (data["rollout"] == rollout)]["kl_ratio"]
            place = x + (i - (len(names) - 1) / 2) * 0.12
            interval = mean_interval(own)
            axes.errorbar(place, interval.value, **style.point(i), label=LABELS[name],
                          yerr=style.error(*interval[:3]))  # fmt: skip
    axes.set_ylabel(f"KL at equal gain, uniform = 1\n({style.seeds(data)}, mean, 95 %)")
    axes.set_xlabel("rollouts")
    axes.set_ylim(bottom=0)
    style.categories(axes, [_span(readings, x) for x in range(len(readings))])


def _span(readings: list[int], x: int) -> str:
    first = readings[x - 1] + 1 if x else 0
    return f"{first} to {readings[x]}"
