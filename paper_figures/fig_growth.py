"""How time and memory of a step grow with the work, beside TRL 1.16 (`make bench-growth`)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import table_of

SOURCE = "benchmarks/results/growth.csv"
BASE = {"model": "smollm2-135m-instruct", "group_size": 8, "prompt_tokens": 64, "layers": "all"}
CURVES = {
    "group_size": "group size",
    "prompt_tokens": "tokens of a prompt",
    "model": "vocabulary",
    "layers": "layers with LoRA",
}
ORDER = {"smollm2-135m-instruct": "49k", "gemma-3-270m": "262k", "top_third": "top third",
         "top_half": "top half", "all": "all"}  # fmt: skip
SIDES = {"tropism": "tropism", "trl": "TRL 4 x n"}
MEASURES = {"step_s": "seconds of a step", "mb": "peak memory, MB"}


def collect(source: Path) -> pd.DataFrame:
    """Every point of every curve, the one they share once for each; the latest measurement."""
    rows = pd.read_csv(table_of(source, command="make bench-growth"))
    rows = rows.drop_duplicates([*BASE, "num_prompts", "max_new_tokens"], keep="last")
    parts = []
    for curve in CURVES:
        others = [name for name in BASE if name != curve]
        on_curve = (rows[others] == pd.Series(BASE)[others]).all(axis=1)
        part = rows[on_curve].assign(curve=curve, value=rows[curve].astype(str))
        parts.append(part.assign(run=part["date"].str[:10] + " " + part["commit"]))
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """A column for each curve: seconds above, memory below."""
    data = pd.read_csv(csv, dtype={"value": str})
    figure = style.figure(style.PAGE, 3.4)
    grid = figure.subplots(2, len(CURVES), sharex="col", sharey="row")
    for line, (measure, label) in zip(grid, MEASURES.items(), strict=True):
        for axes, (curve, name) in zip(line, CURVES.items(), strict=True):
            _draw(axes, data[data["curve"] == curve], measure)
            if measure == "mb":
                axes.set_xlabel(name)
        line[0].set_ylabel(label)
        line[0].set_ylim(bottom=0)
    style.legend_below(figure, grid[0, 0])
    steps = data["steps"].iloc[0]
    grid[0, 0].set_title(f"medians of {steps} steps")
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    known = list(ORDER)
    values = sorted(set(rows["value"]), key=lambda v: known.index(v) if v in known else int(v))
    for i, (side, label) in enumerate(SIDES.items()):
        found = rows.set_index("value")[f"{side}_{measure}"].reindex(values)
        axes.plot(range(len(values)), found, label=label, **style.line(i, marker=True))
    style.categories(axes, [ORDER.get(value, value) for value in values])
