"""KL at a held-out level over rollouts to the level: is an arm below uniform, or only quicker?

Stage 7 of the study, every arm at each of its rates, means of logarithms over seeds. The line is
uniform's: of log KL on log rollouts, one slope for all seeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from paper_figures import arms, study, style
from paper_figures.intervals import mean_interval

SOURCE = arms.SOURCE
LEVEL = 0.722
"""Half way from the base to uniform's best in stage 1: slow runs never reach more."""
SEEDS = 8
ORDER = ("uniform", "gain_steps", "gain_shuffled", "gain_average", "static_top")


def collect(source: Path) -> pd.DataFrame:
    """KL and rollouts of every run where it first reaches the level."""
    rows = arms.rows_of(arms.results_of(source), "gain", "organism")
    found = []
    for (arm, rate, seed), run in rows.groupby(["arm", "learning_rate", "seed"]):
        kl, rollouts = (
            study.at_level(run["held_out"], run[name], [LEVEL])[0] for name in ("kl_in", "rollout")
        )
        found.append(
            {"run": run["run"].iloc[0], "arm": arm, "learning_rate": rate, "seed": seed,
             "level": LEVEL, "kl": kl, "rollouts": rollouts}
        )  # fmt: skip
    return pd.DataFrame(found)


def make(csv: Path) -> Figure:
    """A point for each arm and rate that every seed reached the level at."""
    data = pd.read_csv(csv)
    figure = style.figure(style.COLUMN, 2.9)
    axes = figure.subplots()
    for i, arm in enumerate(name for name in ORDER if name in set(data["arm"])):
        points = []
        for _, own in data[data["arm"] == arm].groupby("learning_rate"):
            if own["kl"].isna().any():
                continue
            kl, rollouts = (mean_interval(np.log(own[name])) for name in ("kl", "rollouts"))
            x, y, low, high = np.exp([rollouts.value, kl.value, kl.low, kl.high])
            points.append((x, y))
            axes.errorbar(x, y, yerr=style.error(y, low, high), **style.point(i), label=arm)
        if points:
            axes.plot(*zip(*sorted(points), strict=True), **style.line(i), lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="rollouts to level",
             ylabel="KL from the start, nats a token")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=6)
    num = data["seed"].nunique()
    seeds = f"{num} seeds" if num == SEEDS else f"unfinished, {num} of {SEEDS} seeds"
    axes.set_title(f"held-out pass {LEVEL}, {seeds}, 95 %")
    style.legend_below(figure, axes, num_columns=3)
    return figure
