"""A user's own prompts: a JSONL file, and a Python function that scores completions of them.

A line, and a scorer that could judge it:
    {"prompt": "What is the capital of France?", "answer": "Paris"}

    def scorer(prompt, completion, *, answer, **columns): ...
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.row_files import MEND, Row, jsonl_rows, shown
from tropism.tasks.splits import NotEnoughPromptsError, check_split, split_of
from tropism.types import Prompt

Verdict = float | Mapping[str, float | None] | None
Scorer = Callable[..., Verdict | Awaitable[Verdict]]
ROLE_KEYS = ("role", "content")


class Rows(Task):
    """Prompts out of JSONL files.

    A row has ``prompt`` (a string) or ``messages`` (a list of ``{"role", "content"}``), and any
    other columns, which the scorer gets by keyword. Equal rows count once.

    Args:
        path: JSONL file of the training rows, and of the held-out ones that have no file of their
            own: those are chosen by a hash of the prompt, so that adding rows moves none.
        scorer: ``scorer(prompt, completion, **columns)`` with the row's prompt (string or
            messages) and the completion's text, by dotted path in a config. It returns a number
            in [0, 1], a mapping of ``components`` to such numbers or None, or None to abstain.
            ``async def`` lets it wait for others (a judge behind HTTP): all completions of a
            rollout are then asked at once.
        components: Names of what the scorer returns; one name for a plain number.
        primary: The component that evaluation reports as the pass rate (make it 0 or 1); the last
            of ``components`` where None.
        validation_path: JSONL file of the validation rows.
        test_path: JSONL file of the test rows.
        validation_fraction: Share of ``path`` held out for validation without such a file.
        test_fraction: Share of ``path`` held out for testing without such a file.
        gold_column: Column with a right answer, for SFT; the scorer gets it too.
        chat: A ``prompt`` becomes one user message of a chat; else it is raw text.
        name: Identifies the task in records and metrics.

    Raises:
        ValueError: Bad components, primary or fractions. Faults of the files are raised by
            ``prompts``, with file and line.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary: str  # type: ignore[misc]

    def __init__(
        self,
        path: str,
        scorer: Scorer,
        components: tuple[str, ...] = ("reward",),
        primary: str | None = None,
        *,
        validation_path: str | None = None,
        test_path: str | None = None,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.0,
        gold_column: str | None = None,
        chat: bool = True,
        name: str = "rows",
    ) -> None:
        components = tuple(components)
        if not components or len(set(components)) != len(components):
            raise ValueError(f"components={components}: name each component once, at least one.")
        if primary is not None and primary not in components:
            raise ValueError(f"primary={primary!r} is not among components={components}.")
        if min(validation_fraction, test_fraction) < 0 or validation_fraction + test_fraction >= 1:
            raise ValueError(
                f"validation_fraction={validation_fraction} and test_fraction={test_fraction}: "
                "give shares from 0 that leave something to train on."
            )
        self.name = name
        self.components = components
        self.primary = components[-1] if primary is None else primary
        self.scorer = scorer
        self.gold_column = gold_column
        self.chat = chat
        self._paths: Mapping[Split, str | None] = {
            "train": path,
            "validation": validation_path,
            "test": test_path,
        }
        self._held_out: Mapping[Split, float] = {
            "validation": 0.0 if validation_path else validation_fraction,
            "test": 0.0 if test_path else test_fraction,
        }

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct rows in an order that ``seed`` keys; more begin with the same ones.

        Raises:
            NotEnoughPromptsError: The split has fewer rows.
            ValueError: A file is missing, empty or malformed; file and line are named.
        """
        check_split(split)
        own_path, shared_path = self._paths[split], self._paths["train"]
        assert shared_path is not None
        rows = self._load(Path(own_path or shared_path))
        if split == "train" or own_path is None:
            rows = [row for row in rows if split_of(_key(row), self._held_out) == split]
        if len(rows) < num:
            remedy = "add rows" if own_path else f"give {split}_path or raise {split}_fraction"
            raise NotEnoughPromptsError(self.name, split, num, len(rows), remedy)
        rows.sort(key=lambda row: hashlib.sha256(f"{seed}/{row.id}".encode()).digest())
        return rows[:num]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """What the scorer says; an awaitable of it where the scorer is asynchronous."""
        columns = dict(prompt.columns)
        verdict = self.scorer(columns.pop("prompt"), completion, **columns)
        if inspect.isawaitable(verdict):
            return self._later(verdict)  # type: ignore[return-value]  # scoring awaits it
        return self._scores(verdict)

    async def _later(self, verdict: Awaitable[Verdict]) -> Scores:
        return self._scores(await verdict)

    def _scores(self, verdict: Verdict) -> Scores:
        if verdict is None:
            return dict.fromkeys(self.components)
        if isinstance(verdict, Mapping):
            return verdict
        if len(self.components) > 1:
            raise ValueError(
                f"the scorer returned {verdict!r}; with components={self.components} it must "
                "return a mapping of them."
            )
        return {self.components[0]: verdict}

    def gold(self, prompt: Prompt) -> str | None:
        """The row's ``gold_column``; None without one."""
        if self.gold_column is None:
            return None
        answer = prompt.columns[self.gold_column]
        return None if answer is None else str(answer)

    def _load(self, path: Path) -> list[Prompt]:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file.")
        seen: dict[str, tuple[str, Prompt]] = {}
        for place, row in jsonl_rows(path):
            try:
                prompt = self._row(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error} {MEND}") from error
            first, other = seen.setdefault(prompt.id, (place, prompt))
            if other != prompt:
                line = first.rpartition(", ")[2]
                raise ValueError(
                    f"{place}: the prompt of {line} again, with other columns. Keep one of the two."
                )
        return [prompt for _, prompt in seen.values()]

    def _row(self, row: Row) -> Prompt:
        if ("prompt" in row) == ("messages" in row):
            raise ValueError(
                "a row must have either `prompt` or `messages`, and not both; it has "
                f"{sorted(row)}."
            )
        columns = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
        if "prompt" in row:
            content = row["prompt"]
            if not isinstance(content, str) or not content.strip():
                raise ValueError(
                    f"`prompt` must be a string that is not blank, not {shown(content)}."
                )
            messages: Any = ({"role": "user", "content": content},) if self.chat else None
        else:
            content = row["messages"]
            _check_messages(content)
            if not self.chat:
                raise ValueError("`messages` need chat=true.")
            messages = tuple(content)
        if self.gold_column is not None and self.gold_column not in columns:
            raise ValueError(
                f"there is no column {self.gold_column!r}, the task's gold_column, only "
                f"{sorted(row)}."
            )
        self._check_columns(content, columns)
        canonical = json.dumps(content, sort_keys=True)
        return Prompt(
            id=f"{self.name}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}",
            task=self.name,
            messages=messages,
            text=None if self.chat else content,
            columns={"prompt": content, **columns},
        )

    def _check_columns(self, prompt: Any, columns: Mapping[str, Any]) -> None:
        """That the scorer can be called with this row, before any completion is paid for."""
        try:
            signature = inspect.signature(self.scorer)
        except ValueError:  # some built-in functions have none
            return
        reserved = {"prompt", "completion", *list(signature.parameters)[:2]}
        if clash := sorted(reserved & columns.keys()):
            raise ValueError(
                f"the columns {clash} bear the names of the scorer's first two arguments; "
                "rename them in the file."
            )
        try:
            signature.bind(prompt, "", **columns)
        except TypeError as error:
            raise ValueError(
                f"the scorer cannot take the columns {sorted(columns)}: {error}."
            ) from error


def _check_messages(messages: Any) -> None:
    is_well_formed = (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(message, dict) for message in messages)
        and all(isinstance(message.get(key), str) for message in messages for key in ROLE_KEYS)
    )
    if not is_well_formed:
        raise ValueError(
            '`messages` must be a list of {"role": ..., "content": ...} with strings, not '
            f"{shown(messages)}."
        )


def _key(prompt: Prompt) -> str:
    """What decides the split: the question alone, whatever the task is called."""
    return json.dumps(prompt.columns["prompt"], sort_keys=True)
