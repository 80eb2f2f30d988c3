"""What equal held-out reward costs: KL to the starting policy, and skills never trained on.

Thin lines are single learning rates, thick ones each arm's frontier over them; why they are taken
where a run first reaches a level, and only where all seeds do: `paper_figures.study`.
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
MEASURES = {"kl_in": "KL in domain,\nnats a token", "kl_out": "KL out of domain,\nnats a token",
            "other_drop": "pass lost on\nother skills"}  # fmt: skip
NUM_LEVELS = 21


def collect(source: Path) -> pd.DataFrame:
    """Frontiers with intervals, single rates, and the runs behind them."""
    results = arms.results_of(source)
    stage = _stage(results)
    rows = study.shared_rates(arms.rows_of(results, stage, "organism"))
    if rows.empty:
        raise MissingDataError(
            f"{SOURCE} has one arm alone in stage {stage}: `{arms.COMMAND}` adds more"
        )
    if rows["seed"].nunique() < 2:
        raise MissingDataError(
            f"{SOURCE} has one seed alone in stage {stage}: `{arms.COMMAND}` adds more"
        )
    levels = np.linspace(rows["held_out"].min(), rows["held_out"].max(), NUM_LEVELS)
    unfinished = study.unfinished(rows)
    parts = []
    for measure in MEASURES:
        parts.append(study.frontiers(rows, measure, levels).assign(kind="frontier"))
        parts.append(study.at_equal_reward(rows, measure, levels).assign(kind="rate"))
        for part in parts[-2:]:
            part["measure"] = measure
            part["label"] = [arms.label(arm, unfinished) for arm in part["arm"]]
    return pd.concat([*parts, arms.run_rows(rows)], ignore_index=True)


def _stage(results: pd.DataFrame) -> str:
    """The main runs where every arm has several learning rates there, else those of stage 1."""
    main = results[(results["stage"] == "main") & (results["twin"] == "organism")]
    rates = main.groupby("arm")["learning_rate"].nunique()
    return "main" if len(rates) and (rates > 1).all() else "choose"


def make(csv: Path) -> Figure:
    """A row for each measure, a column for each family of arms."""
    data = pd.read_csv(csv)
    drawn = data[data["kind"] != "run"]
    families = arms.families(drawn["arm"])
    figure = style.figure(style.PAGE, 6.0)
    grid = figure.subplots(len(MEASURES), len(families), sharex=True, sharey="row")
    num_seeds = data["seed"].nunique()
    for column, (family, members) in zip(grid.T, families.items(), strict=True):
        for axes, (measure, name) in zip(column, MEASURES.items(), strict=True):
            _draw(axes, drawn[drawn["measure"] == measure], members)
            if axes in grid[:, 0]:
                axes.set_ylabel(name)
        column[0].set_title(f"{family}: mean of {num_seeds} seeds, 95 %")
        column[0].legend(loc="upper left")
        column[-1].set_xlabel("held-out pass rate reached")
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, members: list[str]) -> None:
    for i, arm in enumerate(members):
        own = rows[rows["arm"] == arm]
        look = arms.look(arm, i)
        thin = {**look, "lw": 0.5, "alpha": 0.5, "marker": ""}
        for _, rate in own[own["kind"] == "rate"].groupby("learning_rate"):
            axes.plot(rate["level"], rate["value"], **thin)
        best = own[own["kind"] == "frontier"]
        if len(best):
            every = max(1, len(best) // 6)
            axes.plot(best["level"], best["value"], label=best["label"].iloc[0],
                      markevery=(i % every, every), **look)  # fmt: skip
            axes.fill_between(best["level"], best["low"], best["high"], color=look["color"],
                              alpha=0.12, lw=0)  # fmt: skip
    axes.axhline(0, color="0.7", lw=0.6, zorder=0)
