"""On what evidence the loop moved LoRA, and how far apart the step sizes then were."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import loops, records

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def collect(runs: Path) -> pd.DataFrame:
    """Each run's placement decisions, and quantiles over linears of the step sizes after each."""
    found = loops(runs)
    decisions = records(found, "decisions")
    decisions = decisions[decisions["kind"] == "placement"]
    values = [decision["value"] for decision in decisions["decision"]]
    rows = decisions[["run", "seed", "rollout", "status"]].assign(
        kind="decision",
        pooled_z=[value.get("pooled_z") for value in values],
        evidence_z=[value.get("evidence_z") for value in values],
        min_z=[policy["init_args"].get("min_z") for policy in decisions["policy"]],
    )
    plans = records(found, "plans")
    plans = plans[plans["state"] == "TRAIN"]
    scales = plans.groupby(["run", "seed", "rollout"])["lr_scale"].quantile(list(QUANTILES))
    spread = scales.unstack().add_prefix("q").reset_index().assign(kind="plan")
    end = records(found, "steps")["rollout"].max() + 1
    return pd.concat([rows, spread], ignore_index=True).assign(end=end)


def make(csv: Path) -> Figure:
    """A column for each seed: evidence above, step sizes below."""
    data = pd.read_csv(csv)
    seeds = list(data.groupby("seed"))
    figure = style.figure(style.PAGE, 3.4)
    grid = figure.subplots(2, len(seeds), sharex=True, sharey="row", squeeze=False)
    for (evidence, scales), (seed, rows) in zip(grid.T, seeds, strict=True):
        _draw_evidence(evidence, rows[rows["kind"] == "decision"])
        applied = int((rows["status"] == "applied").sum())
        evidence.set_title(f"seed {seed}: {applied} of {rows['status'].count()} applied")
        _draw_scales(scales, rows[rows["kind"] == "plan"], end=float(rows["end"].iloc[0]))
    grid[0, 0].set_ylabel("z of all linears")
    grid[1, 0].set_ylabel("step size of linears")
    style.legend_below(figure, *grid.flat, num_columns=5)
    return figure


def _draw_evidence(axes: Axes, rows: pd.DataFrame) -> None:
    blue = style.COLOURS[0]
    axes.plot(rows["rollout"], rows["pooled_z"], label="this reading", **style.line(1))
    axes.plot(rows["rollout"], rows["evidence_z"], label="with earlier ones", **style.line(0))
    marks = {"applied": ("o", blue), "held": ("o", "white"), "rolled back": ("X", blue)}
    for status, (marker, inside) in marks.items():
        chosen = rows[rows["status"] == status]
        if len(chosen):
            axes.plot(chosen["rollout"], chosen["evidence_z"], marker, c=blue, mfc=inside,
                      label=status)  # fmt: skip
    axes.axhline(rows["min_z"].iloc[0], color="0.5", lw=0.8, label="needed to act")


def _draw_scales(axes: Axes, rows: pd.DataFrame, *, end: float) -> None:
    edges = [*rows["rollout"], end]
    bands = ((0.0, 1.0, 0.2, "all"), (0.25, 0.75, 0.5, "middle half"))
    for low, high, alpha, label in bands:
        axes.stairs(
            rows[f"q{high}"],
            edges,
            baseline=rows[f"q{low}"],
            fill=True,
            color=style.COLOURS[0],
            alpha=alpha,
            label=f"step sizes: {label}",
        )
    axes.stairs(rows["q0.5"], edges, baseline=None, color="black", label="step sizes: median")
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.25, 0.5, 1, 2], ["¼", "½", "1", "2"])
    axes.set(xlabel="rollout", ylim=(0.2, 2.5))
