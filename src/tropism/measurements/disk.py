"""Faults of the disk under a run folder, said in words that name the folder and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def require_writable(folder: str | Path) -> None:
    """Make ``folder`` and write to it once, so that a run fails before its model is loaded.

    Raises:
        ValueError: It cannot be made or written to.
    """
    probe = Path(folder) / f".probe-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("probe", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written to ({error.strerror}): give another one "
            "with --trainer.logger.init_args.save_dir, or change the folder's permissions."
        ) from error


@contextmanager
def explained_disk_full(folder: str | Path) -> Iterator[None]:
    """Say which folder is full and what to do, instead of a bare "No space left on device".

    Raises:
        OSError: Of the same errno, when what runs inside found the disk or the quota full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise OSError(
            error.errno,
            f"the disk of the run folder {folder} is full ({error.strerror}). What was recorded "
            "so far is intact: free some space, or move the folder, and resume from its "
            "checkpoints/last.ckpt (--ckpt_path)",
            error.filename,
        ) from error
