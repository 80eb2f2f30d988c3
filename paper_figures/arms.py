"""The study's table, and its arms: which the measurements move, which are controls, their looks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures import study, style
from paper_figures.sources import MissingDataError, table_of

BASELINES = ("fixed", "uniform")
"""What an arm is compared with: the first of these that ran in the same stage."""
MEASURED = ("signal_shrink", "depth", "top_budget", "top_misalignment", "gain_steps")
CONTROLS = ("shrink_shuffled", "shrink_static_average", "static_top", "rotate", "replay_other")
FAMILIES = {"moved by measurements": MEASURED, "controls": CONTROLS}
COMMAND = "make study"
SOURCE = "experiments/study/results"
"""A folder with a table for each stage, or one table of that name."""

COLUMNS = (
    "stage",
    "twin",
    "arm",
    "learning_rate",
    "group_size",
    "seed",
    "config_hash",
    "rollout",
    "held_out",
    "held_out_n",
    "other",
    "other_n",
    "kl_in",
    "kl_out",
    "seconds",
    "tokens",
    "reward",
    "trainable_params",
    "trainable_params_mean",
    "noise_scale",
    "decisions_applied",
    "run",
)


def read_results(source: Path) -> pd.DataFrame:
    """The study's evaluations, by cell and rollout.

    Args:
        source: A table of ``COLUMNS``, or a folder of them. There each is named after its stage;
            ``hash`` stands for ``config_hash``, and a run is known by it and its ``commit``.

    Returns:
        ``COLUMNS`` and ``other_drop``: what ``other`` has lost since the first evaluation.

    Raises:
        ValueError: A column is missing, or an evaluation stands there twice.
    """
    paths = sorted(source.glob("*.csv")) if source.is_dir() else [source]
    rows = pd.concat([_read_stage(path) for path in paths], ignore_index=True)
    missing = [name for name in COLUMNS if name not in rows]
    if missing:
        raise ValueError(
            f"{source} lacks the columns {missing}: write it with experiments/sweep.py."
        )
    twice = rows[rows.duplicated([*study.CELL, "rollout"])]
    if len(twice):
        first = dict(twice.iloc[0][study.CELL])
        raise ValueError(
            f"{source} has {len(twice)} evaluations twice, first of {first}: keep one run of each "
            "cell."
        )
    rows = rows.sort_values([*study.CELL, "rollout"], ignore_index=True)
    rows["other_drop"] = rows.groupby(study.CELL)["other"].transform("first") - rows["other"]
    return rows


def _read_stage(path: Path) -> pd.DataFrame:
    rows = pd.read_csv(path).rename(columns={"hash": "config_hash"})
    if "stage" not in rows:
        rows["stage"] = path.stem
    if "run" not in rows and {"arm", "config_hash", "commit"} <= set(rows):
        rows["run"] = path.stem + "/" + rows["arm"] + "/" + rows["config_hash"]
        rows["run"] += "@" + rows["commit"].astype(str).str[:7]
    return rows


def results_of(source: Path) -> pd.DataFrame:
    """The study's table.

    Raises:
        MissingDataError: There is none.
    """
    is_there = source.is_file() or any(source.glob("*.csv"))
    found = source if is_there else source.with_suffix(".csv")
    return read_results(table_of(found, command=COMMAND))


def rows_of(results: pd.DataFrame, stage: str, twin: str) -> pd.DataFrame:
    """One stage of one twin.

    Raises:
        MissingDataError: It has not run.
    """
    rows = results[(results["stage"] == stage) & (results["twin"] == twin)]
    if rows.empty:
        raise MissingDataError(
            f"{SOURCE} has no {stage} runs of {twin} yet: `{COMMAND}` makes them"
        )
    return rows


def order(arm: str) -> tuple[int, str]:
    """Sorts what measurements move first, then controls, then all others by name."""
    known = (*MEASURED, *CONTROLS)
    return (known.index(arm), "") if arm in known else (len(known), arm)


def families(arms: Iterable[str]) -> dict[str, list[str]]:
    """The arms that ran, by family, ``uniform`` in front of each; new ones are controls."""
    ran = list(dict.fromkeys(arms))
    others = [arm for arm in ran if arm not in (*BASELINES, *MEASURED, *CONTROLS)]
    found = {}
    for name, members in FAMILIES.items():
        known = [arm for arm in ("uniform", *members) if arm in ran]
        found[name] = known + (others if members is CONTROLS else [])
    return found


def look(arm: str, place: int) -> dict[str, Any]:
    """The baseline is black and solid; the others differ in colour, dashes and marker."""
    if arm in BASELINES:
        return {"color": "black", "ls": "-", "lw": 1.8}
    turn = place + place // 7  # beyond seven arms colours come back, with other dashes and markers
    return {
        **style.line(place - 1),
        "ls": style.DASHES[turn % 7],
        "marker": style.MARKERS[turn % 7],
    }


def label(arm: str, unfinished: dict[Any, str]) -> str:
    """The arm's name, and whether it has fewer seeds than the others."""
    name = arm.replace("_", " ")
    return f"{name} ({unfinished[arm]})" if arm in unfinished else name


def run_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Which runs a figure is made from: rows of kind ``run`` in its CSV."""
    columns = ["stage", "twin", "arm", "learning_rate", "group_size", "seed", "run"]
    return rows[columns].drop_duplicates().assign(kind="run")
