"""SFT, GRPO, and SFT before GRPO, at equal steps and samples (`experiments/warmup/run.py`).

Each arm at the learning rate that was best on a seed of its own. Intervals: bootstrap over seeds,
then prompts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.intervals import mean_interval
from paper_figures.sources import table_of

SOURCE = "experiments/warmup/results.csv"
TUNING_SEED = 100
OWN_RATES = "sft_then_grpo, own rates"
ARMS = {"base": "base", "sft": "SFT", "grpo": "GRPO", "sft_then_grpo": "SFT, GRPO\n(one rate)",
        OWN_RATES: "SFT, GRPO\n(own rates)"}  # fmt: skip
PANELS = {("plain", "trained"): "trained skills, gold answers for all",
          ("plain", "other"): "other skills, the same runs",
          ("bracketed", "trained"): "a form the base never writes"}  # fmt: skip


def collect(source: Path) -> pd.DataFrame:
    """Passes by setting, skills, arm and seed, at the chosen rates; the base as an arm."""
    rows = pd.read_csv(
        table_of(source, command="python experiments/warmup/run.py"), dtype={"learning_rate": str}
    )
    tuning = rows[(rows["seed"] == TUNING_SEED) & (rows["skills"] == "trained")]
    best = tuning.loc[tuning.groupby(["setting", "arm"])["passed_after"].idxmax()]
    best = best[["setting", "arm", "learning_rate"]].assign(is_best=True)
    rows = rows[rows["seed"] != TUNING_SEED].merge(best, how="left")
    is_own = rows["learning_rate"].str.contains("/")
    rows.loc[is_own, "arm"] = OWN_RATES
    rows = rows[is_own | (rows["is_best"] == True)].drop(columns="is_best")  # noqa: E712
    own_base = rows[rows["arm"] == "sft"].assign(arm="base", learning_rate="")
    own_base["passed_after"] = own_base["passed_before"]
    table = pd.concat([own_base, rows], ignore_index=True)
    keys = table[["setting", "arm", "learning_rate", "seed"]].itertuples(index=False)
    names = [f"warmup_{setting}/{arm}_{rate}_{seed}" for setting, arm, rate, seed in keys]
    return table.drop(columns="passed_before").assign(run=names)


def make(csv: Path) -> Figure:
    """One panel for each setting and kind of skills."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.6)
    for axes, ((setting, skills), title) in zip(
        figure.subplots(1, len(PANELS)), PANELS.items(), strict=True
    ):
        rows = data[(data["setting"] == setting) & (data["skills"] == skills)]
        labels, num_most = [], rows.groupby("arm")["seed"].nunique().max()
        for x, (arm, label) in enumerate(ARMS.items()):
            own = rows[rows["arm"] == arm]
            rates = (own["passed_after"] / own["n"]).to_numpy()
            mean = mean_interval(rates, own["n"].to_numpy())
            spread = (np.arange(len(rates)) - (len(rates) - 1) / 2) * 0.03
            axes.plot(x + 0.18 + spread, rates, ".", color="0.6", ms=2.5)
            axes.errorbar(x - 0.1, mean.value, yerr=style.error(*mean[:3]), **style.point(x))
            is_short = len(own) < num_most
            labels.append(f"{label}\nn = {len(own)}" if is_short else label)
        style.categories(axes, labels, rotation=90)
        axes.set_title(f"{title}\n({num_most} seeds, n = {rows['n'].iloc[0]} each)")
    figure.axes[0].set_ylabel("held-out pass rate, greedy")
    return figure
