"""What every recording callback does with the run folder: find it, append to it, rewind it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from tropism.measurements.disk import explained_disk_full
from tropism.measurements.records import RecordTable


@runtime_checkable
class Summarized(Protocol):
    """A callback with something to say in ``run.json``'s summary."""

    def summary(self) -> Mapping[str, Any]:
        """Entries of the summary; called once, when training has ended."""


def run_folder(trainer: Trainer) -> Path:
    """The run's folder, the same on all ranks.

    Raises:
        ValueError: The trainer has no logger with a folder.
    """
    if trainer.log_dir is None:
        raise ValueError(
            "trainer.logger gives no folder to write the run to: set trainer.logger to "
            "lightning.pytorch.loggers.TensorBoardLogger (save_dir, name, version)."
        )
    return Path(trainer.log_dir)


class Recorder:
    """A record table on behalf of a callback.

    Args:
        folder: The run folder.
        table: A table of ``tropism.measurements.records``.
        enabled: Writes nothing where False (ranks other than 0).
    """

    def __init__(self, folder: str | Path, table: str, *, enabled: bool = True) -> None:
        self.folder = Path(folder)
        self.table = RecordTable(folder, table)
        self.enabled = enabled

    def append(self, rows: Iterable[Mapping[str, Any]], *, rollout: int, step: int) -> None:
        """Append the rows of one rollout: all of them or, where the disk is full, none.

        Raises:
            OSError: The disk is full; the message names the folder and the remedy.
            ValueError: A row does not have the table's columns.
        """
        if not self.enabled:
            return
        path = self.table.path
        size = path.stat().st_size if path.exists() else 0
        with explained_disk_full(self.folder):
            try:
                self.table.append(rows, rollout=rollout, step=step)
            except OSError:
                if path.exists():  # half a line would make the whole table unreadable
                    with suppress(OSError):
                        os.truncate(path, size)
                raise

    def rewind(self, rollout: int) -> None:
        """Drop the rows from ``rollout`` on: those that a resumed run writes again."""
        if self.enabled:
            with explained_disk_full(self.folder):
                self.table.truncate(rollout)
