"""Where figures take their data from: finished runs, or tables that the repository carries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tropism.measurements.records import read

REPOSITORY = Path(__file__).resolve().parents[1]


class MissingDataError(Exception):
    """There is nothing to draw yet; the message says which command makes it."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        folder: The run's folder.
        seed: Of the run.
        name: ``experiment/version@commit``, a ``+`` behind where files differed from the commit.
    """

    folder: Path
    seed: int
    name: str


def finished(runs: Path, experiment: str, *, command: str) -> list[Run]:
    """The newest finished run of every seed, by seed.

    Args:
        runs: Folder of all runs.
        experiment: Folder below it.
        command: What makes such a run, for the message.

    Raises:
        MissingDataError: There is none.
    """
    newest: dict[int, tuple[str, Run]] = {}
    for path in sorted((runs / experiment).glob("*/run.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["status"] != "finished":
            continue
        git = facts.get("git") or {}
        commit = f"{str(git.get('sha'))[:7]}{'+' * bool(git.get('dirty'))}"
        run = Run(path.parent, int(facts["seed"]), f"{experiment}/{path.parent.name}@{commit}")
        newest[run.seed] = max(
            newest.get(run.seed, ("", run)), (facts["started"], run), key=lambda entry: entry[0]
        )
    if not newest:
        raise MissingDataError(f"no finished run in {runs / experiment}: `{command}` makes one")
    return [newest[seed][1] for seed in sorted(newest)]


def quickstarts(runs: Path) -> list[Run]:
    """Runs of the quickstart (SmolLM2-135M, structured output)."""
    return finished(runs, "quickstart", command="make quickstart")


def loops(runs: Path) -> list[Run]:
    """Runs of the closed loop (the organism, micro-skills)."""
    return finished(runs, "loop", command="make loop")


def by_model(runs: Path) -> dict[str, list[Run]]:
    """Both, by what their panels are called."""
    return {"SmolLM2-135M": quickstarts(runs), "organism": loops(runs)}


def records(runs: Sequence[Run], table: str) -> pd.DataFrame:
    """One record table of several runs, ``run`` and ``seed`` in front."""
    parts = []
    for run in runs:
        rows = read(run.folder, table)
        rows.insert(0, "run", run.name)
        rows.insert(1, "seed", run.seed)
        parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def table_of(source: Path, *, command: str) -> Path:
    """``source`` if it is there.

    Raises:
        MissingDataError: It is not.
    """
    if not source.exists():
        shown = source.relative_to(REPOSITORY) if source.is_relative_to(REPOSITORY) else source
        raise MissingDataError(f"{shown} is not there yet: `{command}` makes it")
    return source
