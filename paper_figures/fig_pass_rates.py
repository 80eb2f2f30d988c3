"""Greedy answers to held-out prompts before and after training, by reward component.

Intervals are Wilson's; a component that pays in fractions is counted as if it paid whole marks,
which can only widen its interval.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import Run, by_model
from tropism.evaluation.statistics import Estimate, wilson_interval

WHEN = ("base", "tuned")


def collect(runs: Path) -> pd.DataFrame:
    """Rates of every run: component, base or tuned; those of baselines, for the pass."""
    rows = [
        {"run": run.name, "seed": run.seed, "model": model, **row}
        for model, found in by_model(runs).items()
        for run in found
        for row in _rates(run)
    ]
    return pd.DataFrame(rows)


def _rates(run: Run) -> list[dict[str, object]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))["summary"]
    events = EventAccumulator(str(run.folder), size_guidance={"scalars": 0})
    events.Reload()
    rows: list[dict[str, object]] = []
    for task, rates in summary["evaluation"].items():
        num = rates["base"]["n"]
        names = [tag for tag in events.Tags()["scalars"] if tag.startswith(f"eval/{task}/")]
        for tag in names:
            found = events.Scalars(tag)
            for when, event in zip(WHEN, (found[0], found[-1]), strict=True):
                rate = wilson_interval(round(event.value * num), num)
                rows.append(_row(task, tag.rsplit("/", 1)[-1], when, event.value, rate, num))
        for name, rate in rates["baselines"].items():
            given = wilson_interval(round(rate["value"] * rate["n"]), rate["n"])
            rows.append(_row(task, "pass", f"baseline {name}", rate["value"], given, rate["n"]))
    return rows


def _row(
    task: str, component: str, answers: str, value: float, rate: Estimate, num: int
) -> dict[str, object]:
    return {"task": task, "component": component, "answers": answers, "value": value,
            "low": min(rate.low, value), "high": max(rate.high, value), "n": num}  # fmt: skip


def make(csv: Path) -> Figure:
    """One panel for each model."""
    data = pd.read_csv(csv)
    models = list(data.groupby("model", sort=False))
    widths = [len(_columns(rows)) for _, rows in models]
    figure = style.figure(style.PAGE, 2.7)
    every = figure.subplots(1, len(models), width_ratios=widths, sharey=True, squeeze=False)[0]
    for axes, (model, rows) in zip(every, models, strict=True):
        _draw(axes, rows)
        axes.set_title(f"{model}, {rows['task'].iloc[0]}: n = {rows['n'].iloc[0]} a seed")
    every[0].set_ylabel("held-out mean, greedy")
    style.legend_below(figure, every[0])
    return figure


def _columns(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(component, answers) along x: components, the pass (not what repeats it), baselines."""
    is_model = rows["answers"].isin(WHEN)
    values = rows[is_model].groupby("component", sort=False)["value"].agg(tuple)
    order = [name for name in values.index if name != "pass" and values[name] != values["pass"]]
    order.append("pass")
    return [(name, "") for name in order] + [
        ("pass", name) for name in dict.fromkeys(rows["answers"][~is_model])
    ]


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    columns = _columns(rows)
    for x, (component, baseline) in enumerate(columns):
        for j, when in enumerate((baseline,) if baseline else WHEN):
            part = rows[(rows["component"] == component) & (rows["answers"] == when)]
            for i, (_, row) in enumerate(part.iterrows()):
                place = x + (0 if baseline else (j - 0.5) * 0.42) + (i - (len(part) - 1) / 2) * 0.1
                look = style.point(6 if baseline else j)
                look["mfc"] = "white" if when == "base" else look["color"]
                label = ("answers without a model" if baseline else when) if i == 0 else None
                axes.errorbar(
                    place,
                    row["value"],
                    yerr=style.error(row["value"], row["low"], row["high"]),
                    label=label,
                    lw=0.8,
                    **look,
                )
    names = [b.removeprefix("baseline ").replace("_", "\n") if b else c for c, b in columns]
    style.categories(axes, names)
    first = next((x for x, (_, baseline) in enumerate(columns) if baseline), None)
    if first is not None:
        axes.axvspan(first - 0.5, len(columns) - 0.5, color="0.94", lw=0, zorder=0)
    axes.set_ylim(-0.02, 1.02)
