"""The committed rows of a sweep: a CSV from which another machine knows what has been run.

Columns: arm, the settings of the grid, seed, hash of the complete settings, commit, then those of
the study's own table. Rows are sorted, texts are kept as they were written, and the file is
replaced whole: the same cells give the same bytes, in whatever order they finished.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from .cells import Cell

if TYPE_CHECKING:
    import pandas as pd

Label = tuple[str, int, frozenset[tuple[str, str]]]
Row = dict[str, str]


def evaluations(cell: Mapping[str, Any], run: Path) -> pd.DataFrame:
    """What is collected where a sweep file names no function: the run's table of evaluations."""
    from tropism.measurements.records import read

    return read(run, "evals").drop(columns="schema")


class Results:
    """The results file of one sweep.

    Args:
        path: The CSV; made when the first cell has finished.
        collect: ``file.py:function``, from (facts of the cell, run folder) to a table.
        folder: Where ``collect``'s file is named from.
        runs: Folder of all runs; the lock of the file lies there, not in the repository.

    Raises:
        ValueError: There is no such function.
    """

    def __init__(self, path: Path, collect: str | None, folder: Path, runs: Path) -> None:
        self.path = path
        self._collect = evaluations if collect is None else _function(collect, folder)
        self._lock = runs / f".{path.stem}.lock"

    def known(self) -> dict[Label, Row]:
        """Cell -> its first row (hash, commit and so on)."""
        columns, rows = self._read()
        grid = _grid_columns(columns)
        return {_label_of_row(row, grid): row for row in reversed(rows)}

    def add(self, cell: Cell, identity: str, run: Path) -> None:
        """Collect a finished run's rows and put them in the place of older ones of its cell.

        Raises:
            ValueError: There are none, or their columns are not those of the file.
        """
        facts = {"arm": cell.arm.name, **cell.labels, "seed": cell.seed, "hash": identity}
        frame = self._collect(facts, run)
        if not len(frame):
            raise ValueError(f"{self.path}: no rows were collected from {run}: give at least one.")
        commit = json.loads((run / "run.json").read_text(encoding="utf-8"))["git"]["sha"]
        text = frame.to_csv(index=False, lineterminator="\n")
        columns, *values = csv.reader(io.StringIO(text))
        head = {**{k: str(v) for k, v in facts.items()}, "commit": (commit or "")[:10]}
        taken = head.keys() & set(columns)
        if taken:
            raise ValueError(f"{self.path}: rename the collected columns {sorted(taken)}.")
        new = [{**head, **dict(zip(columns, value, strict=True))} for value in values]
        with self._locked():
            old_columns, rows = self._read()
            old_grid, own = _grid_columns(old_columns), _own_columns(old_columns)
            if rows and own != columns:
                raise ValueError(
                    f"{self.path} has the columns {own}, but {columns} were collected: name "
                    "another results file, or remove this one to collect all runs that are here."
                )
            grid = list(dict.fromkeys((*old_grid, *cell.labels)))
            kept = [row for row in rows if _label_of_row(row, old_grid) != label_of(cell)]
            self._write(["arm", *grid, "seed", "hash", "commit", *columns], [*kept, *new])

    def restamp(self, cell: Cell, identity: str) -> None:
        """Give the cell's rows another hash."""
        with self._locked():
            columns, rows = self._read()
            grid = _grid_columns(columns)
            for row in rows:
                if _label_of_row(row, grid) == label_of(cell):
                    row["hash"] = identity
            if rows:
                self._write(columns, rows)

    def _locked(self) -> FileLock:
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self._lock)

    def _read(self) -> tuple[list[str], list[Row]]:
        if not self.path.exists():
            return [], []
        with self.path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), list(reader)

    def _write(self, columns: list[str], rows: Iterable[Row]) -> None:
        grid = _grid_columns(columns)
        keys = ["arm", *grid, "seed"]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        # Stable: within a cell the rows stay in the order in which they were collected.
        writer.writerows(sorted(rows, key=lambda row: [_natural(row.get(k, "")) for k in keys]))
        write_whole(self.path, text.getvalue())


def label_of(cell: Cell) -> Label:
    """What a cell's rows are found by; its hash says whether they are of the settings of now."""
    return cell.arm.name, cell.seed, frozenset((k, str(v)) for k, v in cell.labels.items())


def _label_of_row(row: Row, grid: Iterable[str]) -> Label:
    return row["arm"], int(row["seed"]), frozenset((k, row[k]) for k in grid if row.get(k))


def _grid_columns(columns: list[str]) -> list[str]:
    return columns[1 : columns.index("seed")] if columns else []


def _own_columns(columns: list[str]) -> list[str]:
    return columns[columns.index("commit") + 1 :] if columns else []


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers by size, before texts."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _function(name: str, folder: Path) -> Callable[[Mapping[str, Any], Path], pd.DataFrame]:
    file, _, function = name.partition(":")
    path = folder / file
    if not function or not path.is_file():
        raise ValueError(f"collect: {name!r} is no FILE.py:FUNCTION beside the sweep file.")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what stands beside it, as when it is run itself
    spec = spec_from_file_location(f"collected_by_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)):
        raise ValueError(f"collect: {path} has no function {function!r}.")
    return found  # type: ignore[no-any-return]


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
