"""Where the weights have moved at the end of training, for two models on one kind of scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import by_model, records


def collect(runs: Path) -> pd.DataFrame:
    """``update_norm`` of every linear after each run's last rollout."""
    parts = []
    for model, found in by_model(runs).items():
        rows = records(found, "update_norms")
        last = rows[rows["rollout"] == rows.groupby("run")["rollout"].transform("max")]
        kept = ["run", "seed", "rollout", "layer", "module", "update_norm"]
        parts.append(last[kept].assign(model=model))
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """Maps (mean over seeds), then the same by module and by depth, each seed."""
    data = pd.read_csv(csv)
    models = list(data.groupby("model", sort=False))
    figure = style.figure(style.PAGE, 2.7)
    every = figure.subplots(1, len(models) + 2, width_ratios=[1.5] * len(models) + [1.35, 1.5])
    for axes, (model, rows) in zip(every, models, strict=False):
        table = style.layer_map(rows, "update_norm")
        ends = float(np.nanmin(table)), float(np.nanmax(table))
        image = style.heat_map(axes, table, norm=LogNorm(*ends))
        axes.set_title(f"{model}\n{style.seeds(rows)}, rollout {rows['rollout'].max() + 1}")
        bar = figure.colorbar(image, ax=axes, location="bottom", aspect=14)
        ticks = [float(tick) for tick in np.geomspace(*ends, 3)]
        bar.set_ticks(ticks, labels=[f"{100 * tick:.2g} %" for tick in ticks])
        bar.minorticks_off()
        bar.set_label(r"$\|W_t-W_0\|/\|W_0\|$")
    _by_module(every[-2], models)
    _by_depth(every[-1], models)
    every[-1].legend(loc="upper center", bbox_to_anchor=(0.2, -0.4)).set_in_layout(False)
    return figure


def _by_module(axes: Axes, models: list[tuple[str, pd.DataFrame]]) -> None:
    for i, (model, rows) in enumerate(models):
        means = rows.groupby(["seed", "module"], sort=False)["update_norm"].mean().unstack(0) * 100
        for j, seed in enumerate(means):
            place = np.arange(len(means)) + (i - 0.5) * 0.4 + (j - 1) * 0.1
            look = {**style.point(i), "capsize": 0}
            axes.errorbar(place, means[seed], label=model if j == 0 else None, **look, alpha=0.8)
        style.categories(axes, [style.short(name) for name in means.index], rotation=90)
    _percent(axes)
    axes.set_title("by module\n(each seed)")


def _by_depth(axes: Axes, models: list[tuple[str, pd.DataFrame]]) -> None:
    for i, (model, rows) in enumerate(models):
        means = rows.groupby(["seed", "layer"])["update_norm"].mean().mul(100).reset_index()
        means["depth"] = means["layer"] / means["layer"].max()
        style.mean_and_range(axes, means, "depth", "update_norm", i, label=model)
    _percent(axes)
    axes.set_xlabel("relative depth")
    axes.set_title("by depth\n(mean, range)")


def _percent(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_yticks([0.2, 0.5, 1, 2, 5, 10])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylabel("update norm, %")
