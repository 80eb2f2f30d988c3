"""Every arm of the study against its baseline, after the last rollout.

Differences are paired by seed; intervals draw seeds, then prompts (`paper_figures.intervals`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import arms, study, style
from paper_figures.sources import MissingDataError

SOURCE = arms.SOURCE
MEASURES = {"held_out": "held-out pass", "other": "pass on other skills"}
NOT_COMPARED = ("choose", "groups", "gain", "oracle")
"""Of many rates for the baseline too: they have figures of their own."""


def collect(source: Path) -> pd.DataFrame:
    """Means and single seeds of each difference, by stage, twin, measure and arm."""
    results = arms.results_of(source)
    parts = []
    for (stage, twin), rows in results.groupby(["stage", "twin"], sort=False):
        if stage in NOT_COMPARED:
            continue
        ends = study.last(study.one_rate(rows, results))
        reference, baseline = _baseline(ends, results)
        if baseline.empty:
            continue
        unfinished = study.unfinished(ends)
        share = ends.groupby("arm")["trainable_params_mean"].mean()
        share /= baseline["trainable_params_mean"].mean()
        place = {"stage": stage, "twin": twin, "baseline": reference}
        for measure in MEASURES:
            level = baseline[measure].mean()
            means = study.contrasts(ends, measure, baseline).assign(kind="mean")
            pairs = ends.merge(baseline[["seed", measure]], on="seed", suffixes=("", "_baseline"))
            seeds = pairs[["arm", "seed", "run"]].assign(
                kind="seed", value=pairs[measure] - pairs[f"{measure}_baseline"]
            )
            both = pd.concat([means, seeds]).assign(measure=measure, level=level, **place)
            both = both[both["arm"] != reference]
            both["label"] = [arms.label(arm, unfinished) for arm in both["arm"]]
            parts.append(both.assign(trainable=both["arm"].map(share)))
    if not parts:
        raise MissingDataError(f"{SOURCE} has no baseline yet: `{arms.COMMAND}` makes it")
    return pd.concat(parts, ignore_index=True)


def _baseline(ends: pd.DataFrame, results: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The baseline of this stage, or the main study's where it ran none."""
    for name in arms.BASELINES:
        if name in set(ends["arm"]):
            return name, ends[ends["arm"] == name]
    main = results[(results["stage"] == "main") & results["twin"].isin(ends["twin"])]
    main = main[main["arm"] == "uniform"]
    return "uniform", study.last(study.one_rate(main, results)) if len(main) else main


def make(csv: Path) -> Figure:
    """A row for each stage and twin, a column for each measure."""
    data = pd.read_csv(csv)
    blocks = list(data.groupby(["stage", "twin"], sort=False))
    heights = [2 + rows["arm"].nunique() for _, rows in blocks]
    figure = style.figure(style.PAGE, 0.5 + 0.19 * sum(heights))
    grid = figure.subplots(len(blocks), 2, height_ratios=heights, sharey="row", squeeze=False)
    for line, ((stage, twin), rows) in zip(grid, blocks, strict=True):
        for axes, (measure, name) in zip(line, MEASURES.items(), strict=True):
            part = rows[rows["measure"] == measure]
            _draw(axes, part)
            reference, level = part[["baseline", "level"]].iloc[0]
            axes.set_xlabel(f"{name} minus {reference} ({level:.3f})")
            axes.locator_params(axis="x", nbins=5)
        line[0].set_title(f"{stage} runs, {twin}", loc="left")
    style.legend_below(figure, *grid[:, 0])
    return figure


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    means = rows[rows["kind"] == "mean"].copy()
    means = means.sort_values("arm", key=lambda names: names.map(arms.order), ascending=False)
    for y, (_, row) in enumerate(means.iterrows()):
        own = rows[(rows["kind"] == "seed") & (rows["arm"] == row["arm"])]["value"]
        axes.plot(own, np.full(len(own), y), "|", color="0.55", ms=5, label="each seed")
        is_measured = row["arm"] in arms.MEASURED
        axes.errorbar(row["value"], y, xerr=style.error(row["value"], row["low"], row["high"]),
                      label="mean, 95 %" + is_measured * " (moved by measurements)",
                      **style.point(0 if is_measured else 1))  # fmt: skip
    names = [f"{row['label']}, n = {row['n']:.0f}, weights x {row['trainable']:.2f}"
             for _, row in means.iterrows()]  # fmt: skip
    axes.axvline(0, color="0.5", lw=0.8)
    axes.set_yticks(range(len(means)), names)
    axes.set_ylim(-0.6, len(means) - 0.4)
