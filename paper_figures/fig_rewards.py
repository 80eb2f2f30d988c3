"""Every reward component while training, and what a group still disagrees on.

The standard deviation within a group is what GRPO learns from: a component without any gives no
gradient, however high its mean.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import by_model, records

NUM_BINS = 25


def collect(runs: Path) -> pd.DataFrame:
    """Mean and group standard deviation of each component, seed and bin of rollouts."""
    parts = []
    for model, found in by_model(runs).items():
        rows = records(found, "rewards")
        width = -(-(int(rows["rollout"].max()) + 1) // NUM_BINS)
        rows["rollout"] = rows["rollout"] // width * width + (width - 1) / 2
        by = ["run", "seed", "component", "rollout"]
        means = rows.groupby(by, sort=False)[["mean", "group_std", "weight"]].mean().reset_index()
        parts.append(means.assign(model=model, width=width))
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """One panel for each component."""
    data = pd.read_csv(csv)
    panels = list(data.groupby(["model", "component"], sort=False))
    figure = style.figure(style.PAGE, 3.4)
    every = figure.subplots(2, -(-len(panels) // 2), sharey=True).flat
    for axes, ((model, component), rows) in zip(every, panels, strict=False):
        style.mean_and_range(axes, rows, "rollout", "mean", 0, label="mean of samples")
        style.mean_and_range(axes, rows, "rollout", "group_std", 1, label="std within a group")
        weights = sorted({f"{w:.2g}" for w in rows["weight"].groupby(rows["seed"]).first()})
        axes.set_title(f"{component} (weight {', '.join(weights)}), {model}")
        axes.set(ylim=(0, 1.03), xlabel="rollout")
        width = rows["width"].iloc[0]
        if width > 1:
            axes.set_xlabel(f"rollout (means of {width})")
    for axes in every:  # what is left over
        axes.set_axis_off()
    figure.axes[0].legend(loc="center right")
    figure.supylabel(f"reward component, {style.seeds(data)} (mean, range)", fontsize=8)
    return figure
