"""What ran, on what, and from which weights: the facts of ``run.json``.

Loads no torch until asked for GPUs, and imports no package whose version it reads.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
PACKAGES = ("tropism", "torch", "transformers", "peft", "lightning", "numpy", "vllm")


def collect(
    *,
    seed: int | None = None,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The facts of a run that is starting now.

    Args:
        seed: The seed that everything random in the run derives from.
        model: Where the weights came from (``tropism.weights.source_of``).
        data: Revisions or fingerprints of the data, by task.
        command: The command line; this process's own where None.

    Returns:
        Plain JSON values, None for what this machine does not tell.
    """
    return {
        "started": _now(),
        "command": shlex.join(sys.argv if command is None else command),
        "seed": seed,
        "model": dict(model or {}),
        "data": dict(data or {}),
        "git": git_state(),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in PACKAGES}},
        "hardware": hardware(),
    }


def git_state(file: str | Path = __file__) -> dict[str, Any]:
    """Commit of the checkout that tracks ``file``, and whether it has uncommitted changes.

    Both None outside a checkout. A package installed below somebody else's checkout (its
    ``.venv``) is not tracked there, and does not borrow its commit.
    """
    path = Path(file).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(path.parent), *arguments],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", path.name) is None:
        return {"sha": None, "dirty": None}
    sha, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {"sha": sha, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """CPU, memory and GPUs of this machine; sizes in GB (1e9 bytes)."""
    names = os.sysconf_names
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys()
        else None
    )
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_gb": None if memory is None else round(memory, 1),
        "gpus": _gpus(),
    }


class RunFile:
    """``run.json`` of one run folder, rewritten whole each time so that it is never half there.

    The top level keeps the facts of the first attempt; ``attempts`` has one entry for each start
    of the run, the first included, and ``summary`` what the run came to. Only the process of
    rank 0 may write it.

    Args:
        run_folder: The run's folder; made where it does not exist.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.path = Path(run_folder) / "run.json"

    def read(self) -> dict[str, Any]:
        """Its content, empty where there is none yet.

        Raises:
            ValueError: It is no JSON object.
        """
        if not self.path.exists():
            return {}
        text = self.path.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.path} is no valid JSON ({error}): repair it, or move it away to start a "
                "new one."
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.path} holds no JSON object: move it away to start a new one.")
        return content

    def start(self, facts: Mapping[str, Any]) -> None:
        """Note that an attempt begins; ``facts`` as ``collect`` gives them."""
        content = self.read()
        attempt = {**facts, "status": "running"}
        if content:
            content["status"] = "running"
        else:
            content = {"schema": SCHEMA_VERSION, "status": "running", **facts, "attempts": []}
        content.setdefault("attempts", []).append(attempt)
        self._write(content)

    def update(self, **values: Any) -> None:
        """Set top-level entries; all others stay as they are."""
        self._write({**self.read(), **values})

    def finish(self, summary: Mapping[str, Any], *, status: str = "finished") -> None:
        """Note that the running attempt ended, and what the run came to."""
        content = self.read()
        ending = {"status": status, "finished": _now()}
        # An attempt that failed early must not take the results of an earlier one with it.
        results = {**content.get("summary", {}), **summary}
        if status == "finished" and "error" not in summary:
            results.pop("error", None)
        content |= {**ending, "summary": results}
        if content.get("attempts"):
            content["attempts"][-1] |= ending
        self._write(content)

    def _write(self, content: Mapping[str, Any]) -> None:
        text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``folder`` when all went well.

    On an exception nothing of it stays and an older ``folder`` is untouched. Leftovers of killed
    processes go too, so callers must not write the same folder at the same time.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    filling, old = (target.with_name(f".{target.name}.{end}") for end in ("part", "old"))
    if old.exists() and not target.exists():  # killed between the two renames below
        os.replace(old, target)
    for leftover in (filling, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    filling.mkdir()
    try:
        yield filling
        if target.exists():  # a folder that is not empty cannot be replaced in one step
            os.replace(target, old)
        os.replace(filling, target)
    finally:
        if old.exists() and not target.exists():
            os.replace(old, target)
        for leftover in (filling, old):
            if leftover.exists():
                shutil.rmtree(leftover)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if package == "tropism":  # run from a checkout that is not installed
            from tropism import __version__

            return __version__
        return None


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": gpu.name,
            "memory_gb": round(gpu.total_memory / 1e9, 1),
            "cuda": torch.version.cuda,
        }
        for gpu in devices
    ]


def _plain(value: Any) -> Any:
    """JSON has no NaN, paths or NumPy scalars: null, text and numbers stand for them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
