"""What was asked and answered, prompt by prompt, kept so that a stopped suite goes on.

A row is found again by its job's key and its prompt. The key is a hash of all that could change
the answer or the verdict: weights, task, way of asking, seed, and the code that judges; a changed
setting is another key.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tropism import __version__
from tropism.evaluation.benchmarks import Job
from tropism.measurements.disk import explained_disk_full
from tropism.measurements.records import TABLES, RecordTable
from tropism.tasks.base import Task
from tropism.types import Prompt

TABLE = "eval_samples"
Row = Mapping[str, Any]


class SampleTable:
    """The answers in ``records/eval_samples.jsonl`` of a run folder, old and new ones.

    Args:
        folder: The suite's run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = RecordTable(folder, TABLE)
        self._rows: dict[tuple[str, str], Row] = {}
        # A killed process leaves half a line, behind which nothing may be appended.
        self._table.mend()
        for row in self._table.rows():
            if missing := sorted(set(TABLES[TABLE]) - row.keys()):
                raise ValueError(
                    f"{self._table.path} has a row without {', '.join(missing)}: move the file "
                    "away, and the suite asks again."
                )
            self._keep(row)

    def get(self, key: str, prompt: Prompt) -> Row | None:
        """The answers to a prompt under this key, or None where they are not there yet."""
        return self._rows.get((key, digest(prompt)))

    def append(self, rows: Iterable[Row], *, rollout: int, step: int) -> None:
        """Keep the answers to some prompts, on the disk too."""
        new = list(rows)
        with explained_disk_full(self._folder):
            self._table.append(new, rollout=rollout, step=step)
        for row in new:
            self._keep(row)

    def _keep(self, row: Row) -> None:
        shown = {name: value for name, value in row.items() if name != "texts"}
        self._rows[row["key"], row["prompt_sha"]] = shown


def job_key(job: Job, *, model: Mapping[str, Any], engine: Any, seed: int) -> str:
    """The key of a job's rows.

    Args:
        model: What its weights are: settings and SHA-256 of files.
        engine: The rollout engine.
        seed: Of the samples.
    """
    asked = {
        "model": model,
        "task": describe(job.task),
        "mode": job.mode,
        "max_new_tokens": job.sampling.max_new_tokens,
        "temperature": job.sampling.temperature if job.mode == "sampled" else None,
        "num_samples": job.num_samples,
        "seed": seed if job.mode == "sampled" else None,
        "engine": type(engine).__qualname__,
        "version": f"{__version__} {_own_judges()}",
    }
    return _sha256(asked)


def digest(prompt: Prompt) -> str:
    """SHA-256 of all that a prompt has: what the model sees, and what it is judged by."""
    return _sha256(
        [prompt.id, prompt.text, [dict(m) for m in prompt.messages or ()], dict(prompt.columns)]
    )


def describe(value: Any) -> Any:
    """A setting as plain values: classes and functions by name, objects by their public parts.

    What a task keeps in private attributes (data that it has loaded) is left out: it shows in the
    prompts, which have digests of their own.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Path):
        return str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return _code(value)
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        parts = dict(getattr(value, "__dict__", {}))
    public = {name: part for name, part in parts.items() if not name.startswith("_")}
    if isinstance(value, Task):
        public.pop("name", None)  # it decides nothing about the answers
    return {"class": _code(type(value)), **{name: describe(part) for name, part in public.items()}}


def _code(value: Any) -> str:
    """A class or function by its name; what is not of this package by its source too."""
    name = f"{value.__module__}.{value.__qualname__}"
    if value.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return name
    try:
        file = inspect.getsourcefile(value)
    except TypeError:  # written in C
        return name
    return name if file is None else f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


@lru_cache(maxsize=1)
def _own_judges() -> str:
    """SHA-256 of this package's tasks and rewards, which change between two versions."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("tasks", "shaping", "sandbox"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
