"""Reward weights over training, each component's share of the update, and where they conflict."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper_figures import style
from paper_figures.sources import by_model, records


def collect(runs: Path) -> pd.DataFrame:
    """Weights by rollout, shares by reading, cosines by layer (means over modules and readings)."""
    parts = []
    for model, found in by_model(runs).items():
        rewards = records(found, "rewards")
        by_component = ["run", "seed", "component", "rollout"]
        weights = rewards[by_component].assign(kind="weight", value=rewards["weight"])
        readings = records(found, "pressure")[["run", "rollout"]].drop_duplicates()
        # A reading's shares stand in the rows of its own rollout, and of those until the next.
        shares = rewards.merge(readings, on=["run", "rollout"]).dropna(subset="gradient_share")
        shares = shares[by_component].assign(kind="share", value=shares["gradient_share"])
        cosines = records(found, "reward_gradients")
        cosines = cosines[cosines["component"] != cosines["other"]]
        by = ["run", "seed", "component", "other", "layer"]
        cosines = cosines.groupby(by, sort=False)["cosine"].mean().rename("value").reset_index()
        for rows in (weights, shares, cosines.assign(kind="cosine")):
            parts.append(rows.assign(model=model))
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """A row for each model."""
    data = pd.read_csv(csv)
    models = list(data.groupby("model", sort=False))
    figure = style.figure(style.PAGE, 2.3 * len(models))
    grid = figure.subplots(len(models), 3, squeeze=False)
    for (weights, shares, cosines), (model, rows) in zip(grid, models, strict=True):
        _draw_weights(weights, rows[rows["kind"] == "weight"])
        weights.set_ylabel(f"{model}\nweight in the reward")
        _draw_shares(shares, rows[rows["kind"] == "share"])
        _draw_cosines(cosines, rows[rows["kind"] == "cosine"])
    return figure


def _draw_weights(axes: Axes, rows: pd.DataFrame) -> None:
    for i, (component, own) in enumerate(rows.groupby("component", sort=False)):
        style.mean_and_range(axes, own, "rollout", "value", i, label=str(component))
    axes.set(xlabel="rollout", ylim=(0, 1.05))
    axes.set_title(f"reward weights, {style.seeds(rows)} (mean, range)")
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.72))


def _draw_shares(axes: Axes, rows: pd.DataFrame) -> None:
    components = list(rows.groupby("component", sort=False))
    step = rows["rollout"].max() / 60
    for i, (component, own) in enumerate(components):
        look = {**style.line(i), "ls": "", "marker": style.MARKERS[i], "mfc": "none"}
        shift = (i - (len(components) - 1) / 2) * step
        axes.plot(own["rollout"] + shift, own["value"], label=str(component), **look)
    axes.set(xlabel="rollout", ylabel="share of update energy", ylim=(-0.03, 1.03))
    axes.set_title("share by reading, each seed")
    axes.set_xlim(left=0)


def _draw_cosines(axes: Axes, rows: pd.DataFrame) -> None:
    for i, ((one, other), part) in enumerate(rows.groupby(["component", "other"], sort=False)):
        style.mean_and_range(axes, part, "layer", "value", i, label=f"{one}, {other}")
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set(xlabel="layer", ylabel="cosine of gradients", ylim=(-1.05, 1.05))
    axes.set_title("conflict: below 0 (mean, range)")
    axes.legend(ncols=2, loc="lower center", handlelength=1.7, columnspacing=0.8,
                handletextpad=0.4)  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
