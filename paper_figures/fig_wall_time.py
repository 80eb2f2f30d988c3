"""Held-out pass at equal wall time: what a cheaper step is worth.

Seconds are the processor's, of runs on one thread: what they take on an idle machine, whatever else
ran beside. An arm pays for sampling, scoring, training, and for probes where it needs them. It ends
where its quickest seed did.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from paper_figures import arms, study, style
from paper_figures.sources import MissingDataError

SOURCE = arms.SOURCE
BLOCKS = {("main", "organism"): "organism", ("planted", "planted"): "damaged organism"}
NUM_POINTS = 40


def collect(source: Path) -> pd.DataFrame:
    """Mean curves over seconds, each arm at its chosen learning rate, and their runs."""
    results = arms.results_of(source)
    parts = []
    for (stage, twin), block in BLOCKS.items():
        rows = results[(results["stage"] == stage) & (results["twin"] == twin)]
        if rows.empty:
            continue
        rows = study.one_rate(rows, results)
        unfinished = study.unfinished(rows)
        grid = np.linspace(0, rows["seconds"].max(), NUM_POINTS)
        found = study.curves(rows, "held_out", "seconds", grid).assign(kind="curve")
        found["label"] = [arms.label(arm, unfinished) for arm in found["arm"]]
        parts += [part.assign(block=block) for part in (found, arms.run_rows(rows))]
    if not parts:
        raise MissingDataError(f"{SOURCE} has no such runs yet: `{arms.COMMAND}` makes them")
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """A row for each model, a column for each family of arms."""
    data = pd.read_csv(csv)
    blocks = list(data.groupby("block", sort=False))
    figure = style.figure(style.PAGE, 0.4 + 2.3 * len(blocks))
    grid = figure.subplots(len(blocks), len(arms.FAMILIES), sharey="row", sharex="row",
                           squeeze=False)  # fmt: skip
    for line, (block, rows) in zip(grid, blocks, strict=True):
        curves = rows[rows["kind"] == "curve"]
        for axes, (family, members) in zip(line, arms.families(rows["arm"]).items(), strict=True):
            for i, arm in enumerate(members):
                own, look = curves[curves["arm"] == arm], arms.look(arm, i)
                if own.empty:
                    continue
                axes.plot(own["seconds"], own["value"], label=own["label"].iloc[0],
                          markevery=(i, 8), **look)  # fmt: skip
                axes.fill_between(own["seconds"], own["low"], own["high"], color=look["color"],
                                  alpha=0.12, lw=0)  # fmt: skip
            axes.set_title(f"{block}, {family}: {style.seeds(rows)}, 95 %")
            axes.set_xlabel("processor seconds, evaluations left out")
            axes.legend(loc="lower right")
        line[0].set_ylabel("held-out pass rate")
    return figure
