"""Where each cell of a sweep stands, read from its run folder and from the committed results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cells import Cell, cells_of
from .results import Label, Results, Row, label_of, write_whole
from .settings import Identity, identities
from .specification import Sweep, load

if TYPE_CHECKING:
    import pandas as pd

RECORD = "cell.json"


@dataclass(frozen=True)
class State:
    """A sweep with its cells, and what there is of them on disk, read anew at every question."""

    sweep: Sweep
    runs: Path
    cells: Mapping[str, Cell]
    identities: Mapping[str, Identity]

    @cached_property
    def results(self) -> Results | None:
        """The committed rows, where the sweep file names a file for them."""
        if self.sweep.results is None:
            return None
        return Results(self.sweep.results, self.sweep.collect, self.sweep.path.parent, self.runs)

    def folder(self, key: str) -> Path:
        return self.cells[key].folder(self.sweep, self.runs)

    def record(self, key: str) -> dict[str, Any]:
        """``cell.json``: hash, settings, status of the last attempt, start, end and seconds."""
        return _json(self.folder(key) / RECORD)

    def write(self, key: str, record: Mapping[str, Any]) -> None:
        path = self.folder(key) / RECORD
        write_whole(path, json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n")

    def plain_settings(self, key: str) -> dict[str, Any]:
        """Its complete settings as ``write`` would leave them: JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(self.identities[key].settings, default=str))
        return plain

    def has_run(self, key: str) -> bool:
        """Whether the run folder holds the finished run of exactly these settings."""
        record = self.record(key)
        return record.get("hash") == self.identities[key].hash and (
            record.get("status") != "failed" and self.has_ended(key)
        )

    def has_ended(self, key: str) -> bool:
        """Whether the run itself says that it has finished, of whatever settings it is."""
        return _json(self.folder(key) / "run.json").get("status") == "finished"

    def has_rows(self, key: str) -> bool:
        """Whether the committed results have rows of exactly these settings."""
        row = self._rows().get(label_of(self.cells[key]), {})
        return row.get("hash") == self.identities[key].hash

    def statuses(self) -> dict[str, str]:
        """Key -> ``finished``, ``stale``, ``failed`` or ``unfinished``."""
        rows = self._rows()
        return {key: self._status(key, rows) for key in self.cells}

    def _status(self, key: str, rows: Mapping[Label, Row]) -> str:
        hash_now, record = self.identities[key].hash, self.record(key)
        in_rows = rows.get(label_of(self.cells[key]), {}).get("hash")
        is_same = record.get("hash") == hash_now
        has_run = record.get("status") != "failed" and self.has_ended(key)
        if in_rows == hash_now or (is_same and has_run):
            return "finished"
        if is_same:  # begun again after a change, too
            return "failed" if record.get("status") == "failed" else "unfinished"
        return "stale" if has_run or in_rows is not None else "unfinished"

    def table(self) -> pd.DataFrame:
        """The index: a row per cell, arms in order."""
        import pandas as pd

        known, statuses, rows = self._rows(), self.statuses(), []
        for key, cell in self.cells.items():
            record, run = self.record(key), _json(self.folder(key) / "run.json")
            in_rows = known.get(label_of(cell), {})
            rows.append(
                {
                    "arm": cell.arm.name,
                    "config": os.path.relpath(cell.arm.config),
                    **cell.labels,
                    "seed": cell.seed,
                    "status": statuses[key],
                    "hash": self.identities[key].hash,
                    "folder": str(self.folder(key)) if self.folder(key).is_dir() else None,
                    "commit": (run.get("git") or {}).get("sha") or in_rows.get("commit"),
                    "seconds": record.get("seconds"),
                    "started": record.get("started"),
                    "ended": record.get("ended") or run.get("finished"),
                }
            )
        frame = pd.DataFrame(rows)
        whole = frame.groupby("arm")["status"].transform(lambda status: status.eq("finished").all())
        place = frame.columns.get_loc("status") + 1
        frame.insert(place, "arm_status", whole.map({True: "finished", False: "unfinished"}))
        order = {name: number for number, name in enumerate(self.sweep.arms)}
        return frame.sort_values("arm", key=lambda arm: arm.map(order), kind="stable").reset_index(
            drop=True
        )

    def write_index(self) -> None:
        """``runs/<sweep>/index.csv``, whole or not at all."""
        text = self.table().to_csv(index=False, lineterminator="\n")
        write_whole(self.runs / self.sweep.name / "index.csv", text)

    def collect(self, keys: Iterable[str] | None = None) -> None:
        """Rows of finished runs (of all) to the committed results, where they are not there yet."""
        if self.results is None:
            return
        known = self._rows()
        for key in self.cells if keys is None else keys:
            identity, row = self.identities[key].hash, known.get(label_of(self.cells[key]), {})
            if row.get("hash") != identity and self.has_run(key):
                self.results.add(self.cells[key], identity, self.folder(key))

    def accept(self, key: str) -> None:
        """Let a stale cell count for the settings of now: its rows and record take their hash."""
        identity, record = self.identities[key], self.record(key)
        if record:
            self.write(key, {**record, "hash": identity.hash, "settings": identity.settings})
        if self.results is not None:
            self.results.restamp(self.cells[key], identity.hash)

    def _rows(self) -> dict[Label, Row]:
        return {} if self.results is None else self.results.known()


def open_sweep(path: str | Path, runs: str | Path = "runs") -> State:
    """Read a sweep file and have every setting checked by the CLI (loads torch, some seconds).

    Raises:
        ValueError: Something in the file is refused.
    """
    sweep = load(path)
    cells = cells_of(sweep)
    return State(sweep, Path(runs), cells, identities(sweep, cells))


def index(path: str | Path, runs: str | Path = "runs") -> pd.DataFrame:
    """A row per cell of a sweep file, as it stands now.

    ``status`` is finished, unfinished, failed or stale (other settings than the file has now);
    ``arm_status`` is unfinished until all cells of the arm are finished. A cell that has rows in
    the committed results is finished, wherever its run folder is.
    """
    return open_sweep(path, runs).table()


def results(path: str | Path, runs: str | Path = "runs") -> pd.DataFrame:
    """The committed rows of a sweep file's finished cells, stale ones left out, with arm_status.

    Raises:
        ValueError: The file names no results.
    """
    import pandas as pd

    state = open_sweep(path, runs)
    if state.results is None:
        raise ValueError(f"{path} names no results: add `results: FILE.csv`.")
    if not state.results.path.exists():
        raise ValueError(f"{state.results.path} is not there yet: run the sweep first.")
    frame = pd.read_csv(state.results.path)
    table = state.table()
    now = set(zip(table["arm"], table["hash"], strict=True))
    is_now = [pair in now for pair in zip(frame["arm"], frame["hash"], strict=True)]
    frame = frame[is_now].reset_index(drop=True)
    whole = table.drop_duplicates("arm").set_index("arm")["arm_status"]
    frame.insert(1, "arm_status", frame["arm"].map(whole))
    return frame


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
