"""Are rankings of linears stable: within a run, and from seed to seed?

Pressure is compared from each reading to the next (of other probes), update norms with those at
the end of the run; between seeds, maps of the same time. Debiased values are ranked as they are,
negative ones too. The grey band is where 95 % of two unrelated rankings fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import hypergeom, spearmanr

from paper_figures import style
from paper_figures.sources import by_model, records

TOP = 0.2
SIGNALS = {"raw": "raw energy", "debiased": "signal (debiased)", "snr": "signal / raw",
           "update_norm": "update norm"}  # fmt: skip
MEASURES = {"rank_correlation": "Spearman's rank correlation", "overlap": "overlap of top 20 %"}
Maps = dict[int, pd.Series]


def overlap(one: pd.Series, other: pd.Series) -> float:
    """Share of the top 20 % of ``one`` that is in the top 20 % of ``other``."""
    num = round(TOP * len(one))
    return len(set(one.nlargest(num).index) & set(other.nlargest(num).index)) / num


def collect(runs: Path) -> pd.DataFrame:
    """Both measures for each pair of maps."""
    rows: list[dict[str, object]] = []
    for model, found in by_model(runs).items():
        pressure = records(found, "pressure").assign(
            raw=lambda t: t["raw_sq"],
            debiased=lambda t: t["debiased_sq"],
            snr=lambda t: t["debiased_sq"] / t["raw_sq"],
        )
        norms = records(found, "update_norms")
        last = int(norms["rollout"].max())
        every = max(1, (last + 1) // 24)
        norms = norms[(norms["rollout"] % every == 0) | (norms["rollout"] == last)]
        norms = norms[norms["rollout"] > 0]  # the warm-up's first step has rate 0
        for signal in SIGNALS:
            table = norms if signal == "update_norm" else pressure
            maps = {
                run: {
                    int(rollout): part.set_index(["layer", "module"])[signal]
                    for rollout, part in rows_of_run.groupby("rollout")
                }
                for run, rows_of_run in table.groupby("run", sort=False)
            }
            for kind, run, x, one, other in _pairs(maps, is_sum=signal == "update_norm"):
                rows.append(
                    {"model": model, "signal": signal, "kind": kind, "run": run, "rollout": x,
                     "rank_correlation": spearmanr(one, other.loc[one.index]).statistic,
                     "overlap": overlap(one, other), "num_linears": len(one)}
                )  # fmt: skip
    return pd.DataFrame(rows)


def _pairs(
    maps: dict[str, Maps], *, is_sum: bool
) -> Iterator[tuple[str, str, int, pd.Series, pd.Series]]:
    for run, own in maps.items():
        times = sorted(own)
        for x, then in pairwise(times):
            yield "within a run", run, x, own[x], own[times[-1] if is_sum else then]
    reference = sorted(next(iter(maps.values())))
    for (run, own), (run_2, other) in combinations(maps.items(), 2):
        # Readings fall due a rollout later where one had no probe: they are paired by number.
        for x, y, z in zip(reference, sorted(own), sorted(other), strict=False):
            yield "between seeds", f"{run} {run_2}", x, own[y], other[z]


def make(csv: Path) -> Figure:
    """A row for each measure; columns for models and kinds of pairs."""
    data = pd.read_csv(csv)
    columns = list(data.groupby(["model", "kind"], sort=False))
    figure = style.figure(style.PAGE, 4.0)
    grid = figure.subplots(2, len(columns), sharex="col", sharey="row", squeeze=False)
    for line, measure in zip(grid, MEASURES, strict=True):
        for axes, ((model, kind), rows) in zip(line, columns, strict=True):
            _draw_chance(axes, int(rows["num_linears"].iloc[0]), measure)
            for i, (signal, label) in enumerate(SIGNALS.items()):
                part = rows[rows["signal"] == signal]
                style.mean_and_range(axes, part, "rollout", measure, i, label=label, marker=True)
            if measure == "rank_correlation":
                pairs = rows["run"].nunique()
                axes.set_title(f"{model},\n{kind} ({pairs} {'run' if kind[0] == 'w' else 'pair'}s)")
                axes.set_ylim(-0.5, 1.03)
            else:
                axes.set(xlabel="rollout", ylim=(0, 1.03))
        line[0].set_ylabel(MEASURES[measure])
    style.legend_below(figure, grid[0, 0])
    return figure


def _draw_chance(axes: Axes, num: int, measure: str) -> None:
    if measure == "overlap":
        top = round(TOP * num)
        low, high = hypergeom(num, top, top).interval(0.95)
        mean, low, high = top / num, low / top, high / top
    else:
        mean, high = 0.0, 1.96 / np.sqrt(num - 1)
        low = -high
    axes.axhspan(low, high, color="0.9", lw=0, zorder=0)
    axes.axhline(mean, color="0.5", lw=0.8, label="chance (band: 95 %)")
