"""Group size against convergence, wall time, stability and pass rate, at equal samples a rollout.

Convergence is counted to the level halfway between the start and the best group size's end; a seed
that never reaches it is counted beside the points, and no mean is drawn. Every seed runs at the
learning rate that is best for that size over the other seeds. Stability is how far the
held-out pass ever falls below its best so far.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import arms, study, style
from paper_figures.intervals import mean_interval

SOURCE = arms.SOURCE
MEASURES = {
    "tokens_to_level": "10³ tokens to level",
    "seconds_to_level": "seconds to level",
    "largest_fall": "largest fall of pass",
    "final": "pass at the end",
}
SCALES = {"tokens_to_level": 1e-3}


def collect(source: Path) -> pd.DataFrame:
    """Every measure of each seed, then means with intervals where all seeds have one."""
    results = arms.results_of(source)
    rows = arms.rows_of(results, "groups", "organism")
    rows = study.cross_chosen(rows, "group_size")
    start = rows[rows["rollout"] == rows["rollout"].min()]["held_out"].mean()
    level = (start + study.last(rows).groupby("group_size")["held_out"].mean().max()) / 2
    seeds = [
        {"group_size": size, "seed": seed, "run": run["run"].iloc[0], "level": level,
         "n_prompts": run["held_out_n"].iloc[-1], "measure": measure, "value": value}
        for (size, seed), run in rows.groupby(["group_size", "seed"])
        for measure, value in _measures(run, level).items()
    ]  # fmt: skip
    table = pd.DataFrame(seeds).assign(kind="seed")
    means = []
    for (size, measure), own in table.groupby(["group_size", "measure"], sort=False):
        if own["value"].notna().all():
            counts = own["n_prompts"] if measure == "final" else None
            interval = mean_interval(own["value"], counts)
            means.append({"group_size": size, "measure": measure, **interval._asdict()})
    unfinished = study.unfinished(rows, by="group_size")
    both = pd.concat([table, pd.DataFrame(means).assign(kind="mean")], ignore_index=True)
    return both.assign(unfinished=both["group_size"].map(unfinished))


def _measures(run: pd.DataFrame, level: float) -> dict[str, float]:
    """Of one run."""
    held_out = run["held_out"]
    return {
        "tokens_to_level": float(study.at_level(held_out, run["tokens"], [level])[0]),
        "seconds_to_level": float(study.at_level(held_out, run["seconds"], [level])[0]),
        "largest_fall": float((held_out.cummax() - held_out).max()),
        "final": float(held_out.iloc[-1]),
    }


def make(csv: Path) -> Figure:
    """A panel for each measure."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.3)
    every = figure.subplots(1, len(MEASURES))
    for axes, (measure, title) in zip(every, MEASURES.items(), strict=True):
        rows = data[data["measure"] == measure]
        columns = ["value", "low", "high"]
        _draw(axes, rows.assign(**rows[columns] * SCALES.get(measure, 1)))
        axes.set_title(title)
        axes.set_xlabel("group size")
    every[0].set_ylabel(f"{style.seeds(data)} (mean, 95 %)")
    level = data["level"].max()
    figure.suptitle(f"greedy pass on held-out prompts; level {level:.3f}", fontsize=8)
    return figure


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    sizes = sorted(set(rows["group_size"]))
    for x, size in enumerate(sizes):
        own = rows[rows["group_size"] == size]
        seeds = own[own["kind"] == "seed"]["value"]
        axes.plot(np.full(len(seeds), x - 0.15), seeds, "_", color="0.55", ms=5)
        for _, row in own[own["kind"] == "mean"].iterrows():
            axes.errorbar(x + 0.1, row["value"], **style.point(0),
                          yerr=style.error(row["value"], row["low"], row["high"]))  # fmt: skip
        if seeds.isna().any():
            text = f"{seeds.isna().sum()} of {len(seeds)} never"
            axes.text(x + 0.25, 0.98, text, rotation=90, ha="center", va="top", fontsize=7,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    marked = rows.dropna(subset="unfinished").set_index("group_size")["unfinished"].to_dict()
    names = [f"{size}\nunfinished" if size in marked else str(size) for size in sizes]
    style.categories(axes, names)
    bottom, top = axes.get_ylim()
    is_rate = rows["measure"].iloc[0] == "final"
    bottom = bottom if is_rate else min(0, bottom)
    axes.set_ylim(bottom, top + 0.15 * (top - bottom))
