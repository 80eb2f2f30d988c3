"""Having tasks judge completions, with every fault named, and their scores as tensors.

A component has the same name in a batch as in its task, unless several tasks have one of that name:
then it is ``task.component``.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tropism.tasks.base import Scores, Task
from tropism.types import Prompt, Rollout

MAX_CONCURRENT = 64
"""Asynchronous verdicts that are awaited at the same time."""


class RewardError(RuntimeError):
    """A task's verifier failed, or returned what it must not; the run stops."""


class BatchScores(dict[str, float | None]):
    """The scores of one completion by its task's component names.

    Attributes:
        batch_names: Component -> its name in a batch.
        all_names: Names in a batch of the components of all tasks, in order.
    """

    def __init__(
        self, scores: Scores, batch_names: Mapping[str, str], all_names: Sequence[str]
    ) -> None:
        super().__init__(scores)
        self.batch_names = batch_names
        self.all_names = all_names


def component_names(tasks: Mapping[str, Task]) -> dict[tuple[str, str], str]:
    """(task, component) -> the component's name in a batch."""
    count = Counter(component for task in tasks.values() for component in task.components)
    return {
        (name, component): component if count[component] == 1 else f"{name}.{component}"
        for name, task in tasks.items()
        for component in task.components
    }


def score_rollouts(tasks: Mapping[str, Task], rollouts: Sequence[Rollout]) -> list[list[Scores]]:
    """Have each prompt's task judge its completions, and check what it returns.

    A task whose ``score`` is a coroutine is asked about all completions at once.

    Returns:
        A list of G scores for each rollout.

    Raises:
        RewardError: The task raised (chained), named other components than it declares, or gave a
            value that is neither None nor a finite number in [0, 1].
    """
    texts = [(r.prompt, completion.text) for r in rollouts for completion in r.completions]
    scores = iter(_score(tasks, texts))
    return [[next(scores) for _ in rollout.completions] for rollout in rollouts]


def score_completions(
    tasks: Mapping[str, Task], prompt: Prompt, completions: Sequence[str]
) -> list[Scores]:
    """``score_rollouts`` for the texts of one prompt."""
    return _score(tasks, [(prompt, text) for text in completions])


def _score(tasks: Mapping[str, Task], texts: Sequence[tuple[Prompt, str]]) -> list[Scores]:
    names = component_names(tasks)
    verdicts: list[Any] = []
    for prompt, text in texts:
        if prompt.task not in tasks:
            raise RewardError(
                f"prompt {prompt.id!r} is of task {prompt.task!r}, which is not among "
                f"{sorted(tasks)}."
            )
        task = tasks[prompt.task]
        # Whatever a task raises is a fault of the task: it is renamed here, never swallowed.
        try:
            verdicts.append(task.score(prompt, text))
        except Exception as error:
            raise _failure(task, prompt, text, error) from error
    waiting = {i: verdict for i, verdict in enumerate(verdicts) if inspect.isawaitable(verdict)}
    for i, answer in zip(waiting, _wait_for(list(waiting.values())), strict=True):
        if isinstance(answer, Exception):
            prompt, text = texts[i]
            raise _failure(tasks[prompt.task], prompt, text, answer) from answer
        verdicts[i] = answer
    every = list(names.values())
    return [
        BatchScores(
            _checked(tasks[prompt.task], prompt, text, verdict),
            {name: names[prompt.task, name] for name in tasks[prompt.task].components},
            every,
        )
        for (prompt, text), verdict in zip(texts, verdicts, strict=True)
    ]


def _wait_for(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results in order, exceptions in their place."""

    async def gather() -> list[Any]:
        places = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(awaitable: Awaitable[Any]) -> Any:
            async with places:
                return await awaitable

        return await asyncio.gather(*map(one, awaitables), return_exceptions=True)

    return _run(gather()) if awaitables else []


def _run(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none is running
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as elsewhere:  # inside a notebook's loop
        return elsewhere.submit(asyncio.run, coroutine).result()


def _failure(task: Task, prompt: Prompt, completion: str, error: Exception) -> RewardError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RewardError(
        f"{_where(task)} raised {type(error).__name__}: {error} (in {frame.name}, "
        f"{frame.filename}:{frame.lineno}) {_row(prompt, completion)}"
    )


def _checked(task: Task, prompt: Prompt, completion: str, scores: Any) -> Scores:
    if not isinstance(scores, Mapping) or set(scores) != set(task.components):
        given = sorted(scores) if isinstance(scores, Mapping) else scores
        raise RewardError(
            f"{_where(task)} returned {given!r} where {sorted(task.components)} are declared "
            f"{_row(prompt, completion)}"
        )
    for component, value in scores.items():
        if value is None:
            continue
        if not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:  # NaN fails both
            raise RewardError(
                f"{_where(task)} gave {component}={value!r}; return a number from 0 to 1, or None "
                f"to abstain {_row(prompt, completion)}"
            )
    return {
        component: None if scores[component] is None else float(scores[component] or 0.0)
        for component in task.components
    }


def _where(task: Task) -> str:
    scorer: Any = getattr(task, "scorer", None)
    inside = (
        f" ({scorer.__module__}.{scorer.__qualname__})" if hasattr(scorer, "__qualname__") else ""
    )
    return f"{type(task).__module__}.{type(task).__qualname__}.score{inside}"


def _row(prompt: Prompt, completion: str, limit: int = 500) -> str:
    shown = completion if len(completion) <= limit else completion[:limit] + "..."
    return f"for prompt {prompt.id!r} of task {prompt.task!r}, completion {shown!r}."


def component_tensors(scores: Sequence[Scores]) -> dict[str, Tensor]:
    """The scores of a batch as tensors.

    Args:
        scores: [B] mappings, in row order, as ``score_completions`` returns them.

    Returns:
        Name -> [B] fp32 on CPU. NaN where the component abstained, or belongs to another task;
        the names are the same for every batch of a run.
    """
    names: dict[str, None] = {}
    rows: list[dict[str, float | None]] = []
    for row in scores:
        renamed = row.batch_names if isinstance(row, BatchScores) else {name: name for name in row}
        names.update(dict.fromkeys(row.all_names if isinstance(row, BatchScores) else row))
        rows.append({renamed[component]: value for component, value in row.items()})
    return {
        name: torch.tensor(
            [math.nan if (value := row.get(name)) is None else value for row in rows],
            dtype=torch.float32,
        )
        for name in names
    }
