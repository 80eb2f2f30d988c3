"""Where the reward pulls at the first reading, and which of it is more than chance.

Colour is the signal's share of a prompt's gradient energy (debiased over raw, a negative one shown
as 0). Hatched is what does not stand out from its permutation null (|z| at most 2). All linears
share the same prompts and permutations, so their z move together from seed to seed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import norm

from paper_figures import style
from paper_figures.sources import by_model, records

LIMIT = 2.0
HATCHED = f"|z| at most {LIMIT:g}"
EDGES = np.arange(-4.0, 8.01, 0.5)


def collect(runs: Path) -> pd.DataFrame:
    """Every linear at the first reading of each run."""
    parts = []
    for model, found in by_model(runs).items():
        rows = records(found, "pressure")
        first = rows[rows["rollout"] == rows.groupby("run")["rollout"].transform("min")]
        kept = ["run", "seed", "rollout", "probes_pooled", "layer", "module", "raw_sq",
                "debiased_sq", "null_z"]  # fmt: skip
        parts.append(first[kept].assign(model=model))
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """A row for each model: maps of up to three seeds, then all z against the null."""
    data = pd.read_csv(csv)
    data["snr"] = (data["debiased_sq"] / data["raw_sq"]).clip(lower=0)
    models = list(data.groupby("model", sort=False))
    figure = style.figure(style.PAGE, 2.6 * len(models))
    grid = figure.subplots(len(models), 4, width_ratios=(1, 1, 1, 1.6), squeeze=False)
    for line, (model, rows) in zip(grid, models, strict=True):
        top = float(rows["snr"].quantile(0.99))
        runs = list(rows.groupby("seed"))[:3]
        for axes, (seed, part) in zip(line, runs, strict=False):
            within = style.layer_map(part.assign(z=part["null_z"].abs()), "z") <= LIMIT
            image = style.heat_map(
                axes, style.layer_map(part, "snr"), hatched=within, vmin=0, vmax=top
            )
            beyond = int((part["null_z"].abs() > LIMIT).sum())
            axes.set_title(f"seed {seed}: {beyond} of {len(part)}\nbeyond |z| = {LIMIT:g}")
        for axes in line[1:3]:
            axes.set_ylabel("")
        line[0].set_ylabel(f"{model}\nlayer")
        bar = figure.colorbar(image, ax=list(line[:3]), pad=0.01, aspect=25, extend="max")
        bar.set_label("signal / raw energy")
        _draw_null(line[3], rows)
    grid[0, 3].bar(np.nan, np.nan, color="white", ec="0.5", hatch="////", lw=0.5, label=HATCHED)
    style.legend_below(figure, *grid[:, 3])
    return figure


def _draw_null(axes: Axes, rows: pd.DataFrame) -> None:
    """Share of linears in each bin of z; what lies outside is counted in the outermost."""
    for i, (seed, part) in enumerate(rows.groupby("seed")):
        z = part["null_z"].dropna().clip(EDGES[0], EDGES[-1] - 1e-9)
        counts = np.histogram(z, EDGES)[0] / len(z)
        axes.stairs(counts, EDGES, label=f"seed {seed}", **style.line(i))
    fine = np.linspace(EDGES[0], EDGES[-1], 200)
    axes.plot(fine, 0.5 * norm.pdf(fine), color="0.5", lw=3, alpha=0.5, label="normal null")
    for limit in (-LIMIT, LIMIT):
        axes.axvline(limit, color="0.6", lw=0.6)
    rollouts = sorted(set(rows["rollout"]))
    probes = sorted(set(rows["probes_pooled"]))
    axes.set(xlabel="z (permutation null)", ylabel="share of linears")
    axes.set_title(
        f"rollout {', '.join(map(str, rollouts))},\n{', '.join(map(str, probes))} probes pooled"
    )
