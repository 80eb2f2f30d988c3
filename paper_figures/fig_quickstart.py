"""What `make quickstart` does: reward by component, held-out passes, and where the update went."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import quickstarts, records


def collect(runs: Path) -> pd.DataFrame:
    """Long table of the quickstart runs below ``runs``: kind, x, series, value, low, high, n."""
    found = quickstarts(runs)
    names = {"benchmark": "series", "ci_low": "low", "ci_high": "high", "component": "series",
             "mean": "value", "module": "series", "update_norm": "value"}  # fmt: skip
    norms = records(found, "update_norms")
    norms = norms[norms["rollout"] == norms.groupby("run")["rollout"].transform("max")]
    parts = {
        "reward": records(found, "rewards").assign(x=lambda rows: rows["rollout"]),
        "eval": records(found, "evals").assign(x=lambda rows: rows["rollout"]),
        "norm": norms.assign(x=norms["layer"]),
    }
    columns = ["run", "seed", "kind", "x", "series", "value", "low", "high", "n"]
    return pd.concat(
        [
            rows.drop(columns="value" if kind == "norm" else [], errors="ignore")
            .rename(columns=names)
            .assign(kind=kind)
            .reindex(columns=columns)
            for kind, rows in parts.items()
        ],
        ignore_index=True,
    )


def make(csv: Path) -> Figure:
    """Left: sampled reward components. Middle: greedy held-out passes. Right: update norms."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.6)
    rewards, evals, norms = figure.subplots(1, 3, width_ratios=(3, 1.6, 2.4))
    _draw_rewards(rewards, data[data.kind == "reward"])
    _draw_evals(evals, data[data.kind == "eval"])
    table = style.layer_map(
        data[data.kind == "norm"].rename(columns={"x": "layer", "series": "module"}), "value"
    )
    image = style.heat_map(norms, table, vmin=0)
    norms.set_title(f"update $\\|W_t - W_0\\| / \\|W_0\\|$,\nmean of {style.seeds(data)}")
    figure.colorbar(image, ax=norms)
    return figure


def _draw_rewards(axes: Axes, rows: pd.DataFrame) -> None:
    for i, (component, part) in enumerate(rows.groupby("series", sort=False)):
        style.mean_and_range(axes, part, "x", "value", i, label=str(component))
    axes.set(xlabel="rollout", ylabel="mean of 32 samples", ylim=(0, 1.02))
    axes.set_title(f"reward while training,\n{style.seeds(rows)} (mean, range)")
    axes.legend()


def _draw_evals(axes: Axes, rows: pd.DataFrame) -> None:
    for i, (seed, part) in enumerate(rows.groupby("seed")):
        for j, (_, row) in enumerate(part.iloc[[0, -1]].iterrows()):
            axes.errorbar(
                j + (i - 1) * 0.14,
                row["value"],
                yerr=style.error(row["value"], row["low"], row["high"]),
                **style.point(i),
                label=f"seed {seed}" if j else None,
            )
    style.categories(axes, ["base", "tuned"])
    axes.set(ylim=(0, 1.02), ylabel="pass rate")
    axes.set_title(f"held-out pass\n(n = {rows['n'].iloc[0]:.0f}, 95 %)")
    axes.legend(loc="lower right", bbox_to_anchor=(1.12, 0), handlelength=1, handletextpad=0.3)
