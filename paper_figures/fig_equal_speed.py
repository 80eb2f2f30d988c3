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
LEVELS = (0.722, 0.745)
"""Half way, and three quarters of the way, from the base to uniform's best in stage 1."""
ORDER = ("uniform", "gain_steps", "gain_shuffled", "gain_average", "static_top")


def collect(source: Path) -> pd.DataFrame:
    """Log KL and log rollouts of every run where it first reaches each level."""
    rows = arms.rows_of(arms.results_of(source), "gain", "organism")
    found = []
    for (arm, rate, seed), run in rows.groupby(["arm", "learning_rate", "seed"]):
        kl, rollouts = (
            study.at_level(run["held_out"], run[name], LEVELS) for name in ("kl_in", "rollout")
        )
        found += [
            {"run": run["run"].iloc[0], "arm": arm, "learning_rate": rate, "seed": seed,
             "level": level, "kl": kl[i], "rollouts": rollouts[i]}
            for i, level in enumerate(LEVELS)
        ]  # fmt: skip
    return pd.DataFrame(found)


def make(csv: Path) -> Figure:
    """A panel for each level."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.8)
    every = figure.subplots(1, len(LEVELS))
    for axes, level in zip(every, LEVELS, strict=True):
        rows = data[data["level"] == level]
        for i, arm in enumerate(name for name in ORDER if name in set(rows["arm"])):
            points = []
            for rate, own in rows[rows["arm"] == arm].groupby("learning_rate"):
                if own["kl"].isna().any():
                    continue
                kl, rollouts = (mean_interval(np.log(own[name])) for name in ("kl", "rollouts"))
                low, high = np.exp(kl.low), np.exp(kl.high)
                x, y = np.exp(rollouts.value), np.exp(kl.value)
                points.append((x, y))
                axes.errorbar(x, y, yerr=style.error(y, low, high), **style.point(i), label=arm)
                axes.annotate(f"{rate:.2g}", (x, y), (3, 3), textcoords="offset points",
                              fontsize=6, color="0.4")  # fmt: skip
            axes.plot(*zip(*sorted(points), strict=True), **style.line(i), lw=0.8)
        axes.set(xscale="log", yscale="log", xlabel="rollouts to level")
        axes.set_title(f"at a held-out pass of {level}, {style.seeds(rows)}, 95 %")
    every[0].set_ylabel("KL from the start, nats a token")
    style.legend_below(figure, *every)
    return figure
