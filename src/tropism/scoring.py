"""Having tasks judge completions, with every fault named, and their scores as tensors.

A component has the same name in a batch as in its task, unless several tasks have one of that name:
then it is ``task.component``. Extra rewards are components of every task that carries them.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tropism.tasks.base import Scores, Task
from tropism.tasks.extra import Carrier, ExtraReward
from tropism.tasks.waiting import wait_for
from tropism.types import Completion, Prompt, Rollout


class RewardError(RuntimeError):
    """A task's verifier or an extra reward failed, or returned what it must not; the run stops."""


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
    """Have each prompt's task judge its completions, then its extra rewards; check what they say.

    A task whose ``score`` is a coroutine is asked about all completions at once, and so is each
    extra reward.

    Returns:
        A list of G scores for each rollout.

    Raises:
        RewardError: The task or an extra reward raised (chained), the task named other components
            than it declares, or a value is neither None nor a finite number in [0, 1].
    """
    texts = [(r.prompt, completion.text) for r in rollouts for completion in r.completions]
    own, extra = _own_scores(tasks, texts), _extra_scores(tasks, rollouts)
    both = [{**one, **more} for one, more in zip(own, extra, strict=True)]
    scores = iter(_named(tasks, [prompt for prompt, _ in texts], both))
    return [[next(scores) for _ in rollout.completions] for rollout in rollouts]


def score_completions(
    tasks: Mapping[str, Task], prompt: Prompt, completions: Sequence[str]
) -> list[Scores]:
    """``score_rollouts`` for texts of one prompt; extra rewards, which judge samples, abstain."""
    scores = _own_scores(tasks, [(prompt, text) for text in completions])
    every = [{**dict.fromkeys(tasks[prompt.task].components), **one} for one in scores]
    return _named(tasks, [prompt] * len(every), every)


def _named(
    tasks: Mapping[str, Task], prompts: Sequence[Prompt], scores: Sequence[Scores]
) -> list[Scores]:
    names = component_names(tasks)
    every = list(names.values())
    return [
        BatchScores(one, {name: names[prompt.task, name] for name in one}, every)
        for prompt, one in zip(prompts, scores, strict=True)
    ]


def _own_scores(tasks: Mapping[str, Task], texts: Sequence[tuple[Prompt, str]]) -> list[Scores]:
    judges = {n: t.task if isinstance(t, Carrier) else t for n, t in tasks.items()}
    verdicts: list[Any] = []
    for prompt, text in texts:
        if prompt.task not in judges:
            raise RewardError(
                f"prompt {prompt.id!r} is of task {prompt.task!r}, which is not among "
                f"{sorted(judges)}."
            )
        task = judges[prompt.task]
        # Whatever a task raises is a fault of the task: it is renamed here, never swallowed.
        try:
            verdicts.append(task.score(prompt, text))
        except Exception as error:
            raise _failure(_where(task), prompt, text, error) from error
    waiting = {i: verdict for i, verdict in enumerate(verdicts) if inspect.isawaitable(verdict)}
    for i, answer in zip(waiting, wait_for(list(waiting.values())), strict=True):
        if isinstance(answer, Exception):
            prompt, text = texts[i]
            raise _failure(_where(judges[prompt.task]), prompt, text, answer) from answer
        verdicts[i] = answer
    return [
        _checked(judges[prompt.task], prompt, text, verdict)
        for (prompt, text), verdict in zip(texts, verdicts, strict=True)
    ]


def _extra_scores(
    tasks: Mapping[str, Task], rollouts: Sequence[Rollout]
) -> list[dict[str, float | None]]:
    """What each extra reward says of the rows whose task carries it, asked once about them all."""
    rows = [(rollout.prompt, one) for rollout in rollouts for one in rollout.completions]
    scores: list[dict[str, float | None]] = [{} for _ in rows]
    asked: dict[str, tuple[ExtraReward, list[int]]] = {}
    for i, (prompt, _) in enumerate(rows):
        task = tasks[prompt.task]
        for reward in task.extra_rewards if isinstance(task, Carrier) else ():
            asked.setdefault(reward.name, (reward, []))[1].append(i)
    for name, (reward, places) in asked.items():
        for i, value in zip(places, _ask(reward, [rows[i] for i in places]), strict=True):
            scores[i][name] = value
    return scores


def _ask(reward: ExtraReward, rows: Sequence[tuple[Prompt, Completion]]) -> list[float | None]:
    where = f"{type(reward).__module__}.{type(reward).__qualname__}"
    prompts, completions = zip(*rows, strict=True)
    try:
        values = list(reward.score_batch(prompts, completions))
    except Exception as error:
        raise _failure(where, *_failing_row(reward, rows), error) from error
    if len(values) != len(rows):
        raise RewardError(f"{where} gave {len(values)} scores for {len(rows)} completions.")
    return [
        _number(where, reward.name, value, prompt, completion.text)
        for (prompt, completion), value in zip(rows, values, strict=True)
    ]


def _failing_row(
    reward: ExtraReward, rows: Sequence[tuple[Prompt, Completion]]
) -> tuple[Prompt, str]:
    """The first row that fails alone too; the first of all where only the batch does."""
    for prompt, completion in rows:
        try:
            reward.score_batch([prompt], [completion])
        except Exception:
            return prompt, completion.text
    prompt, completion = rows[0]
    return prompt, completion.text


def _failure(where: str, prompt: Prompt, completion: str, error: Exception) -> RewardError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RewardError(
        f"{where} raised {type(error).__name__}: {error} (in {frame.name}, "
        f"{frame.filename}:{frame.lineno}) {_row(prompt, completion)}"
    )


def _checked(task: Task, prompt: Prompt, completion: str, scores: Any) -> Scores:
    if not isinstance(scores, Mapping) or set(scores) != set(task.components):
        given = sorted(scores) if isinstance(scores, Mapping) else scores
        raise RewardError(
            f"{_where(task)} returned {given!r} where {sorted(task.components)} are declared "
            f"{_row(prompt, completion)}"
        )
    return {
        component: _number(_where(task), component, scores[component], prompt, completion)
        for component in task.components
    }


def _number(
    where: str, component: str, value: Any, prompt: Prompt, completion: str
) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:  # NaN fails both
        raise RewardError(
            f"{where} gave {component}={value!r}; return a number from 0 to 1, or None to abstain "
            f"{_row(prompt, completion)}"
        )
    return float(value)


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
