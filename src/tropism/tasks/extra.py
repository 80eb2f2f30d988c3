"""Reward components that any task can carry besides its own.

A task judges the text of an answer to its question. What is to be said of every answer, whatever
was asked (its length, its repetitions, what a reward model thinks of it), is an ``ExtraReward`` of
the run; ``tropism.shaping`` has some.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tropism.tasks.base import Options, Scores, Split, Task
from tropism.types import Completion, Prompt

if TYPE_CHECKING:
    import torch


class ExtraReward(ABC):
    """Judges completions of whatever task by one component.

    Its constructor takes the settings and loads nothing.

    Attributes:
        name: Of the component, in ``reward_weights``, records and metrics.
        only_where: Names of constructor arguments that say where and how fast it is computed, and
            leave the scores as they are; a resumed run may change them.
    """

    name: str
    only_where = frozenset[str]()  # as a ClassVar it would hide subclasses' types from jsonargparse

    def identity(self) -> dict[str, Any]:
        """What its scores depend on, for a resumed run to compare: the class, and its arguments.

        Constructor arguments count that are attributes of the same name; of what is no plain value,
        its name or that of its class.
        """
        arguments = inspect.signature(type(self)).parameters.keys() - self.only_where
        values = {name: _plain(getattr(self, name)) for name in arguments if hasattr(self, name)}
        return {"name": self.name, "class": _path(type(self)), **values}

    def source(self) -> Mapping[str, Any]:
        """Where the weights that it loaded are from, for ``run.json``; empty where it has none."""
        return {}

    def prepare(self, *, max_new_tokens: int, device: torch.device) -> None:  # noqa: B027
        """Load what is needed; called before the first completion is judged.

        Args:
            max_new_tokens: The completion limit in tokens.
            device: Where the policy is.

        Raises:
            ValueError: The settings do not fit the run.
        """

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """A value in [0, 1], or None to abstain; an exception stops the run."""

    def score_batch(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> Sequence[float | None]:
        """``score`` of each pair, in order; for those that judge many at a time with less work.

        Args:
            prompts: [B] the prompt of each completion.
            completions: [B] all of a rollout, or of an evaluation's batch.
        """
        return [self.score(*pair) for pair in zip(prompts, completions, strict=True)]


class Carrier(Task):
    """A task whose components include those of extra rewards; all else is the task's own.

    ``score`` sees only text and gives what the task gives: ``tropism.scoring`` adds the rest. The
    primary component stays the task's.

    Args:
        task: Makes the prompts, and judges the answers.
        extra_rewards: At least one.

    Raises:
        ValueError: A name that is no identifier, or that two components would have.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary: str  # type: ignore[misc]

    def __init__(self, task: Task, extra_rewards: Sequence[ExtraReward]) -> None:
        self.task = task
        self.extra_rewards = tuple(extra_rewards)
        self.name = task.name
        self.primary = task.primary
        self.components = tuple(task.components)
        for reward in self.extra_rewards:
            if not reward.name.isidentifier():
                raise ValueError(
                    f"extra_rewards: name={reward.name!r} of {type(reward).__name__} must be made "
                    "of letters, digits and underscores."
                )
            if reward.name in self.components:
                raise ValueError(
                    f"extra_rewards: {type(reward).__name__} is named {reward.name!r} like another "
                    f"component of task {task.name!r}, which has {list(self.components)}; give it "
                    "another `name`."
                )
            self.components = (*self.components, reward.name)

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return self.task.prompts(split, num, seed)

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return self.task.score(prompt, completion)

    def gold(self, prompt: Prompt) -> str | None:
        return self.task.gold(prompt)

    def options(self, prompt: Prompt) -> Options | None:
        return self.task.options(prompt)

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        return self.task.baselines()


def _plain(value: Any) -> Any:
    """As a checkpoint has it, which is read as tensors and plain values alone."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _path(value) if hasattr(value, "__qualname__") else _path(type(value))


def _path(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def carry(tasks: Sequence[Task], extra_rewards: Sequence[ExtraReward] | None) -> dict[str, Task]:
    """Name -> task, each with the extra rewards where there are any."""
    if not extra_rewards:
        return {task.name: task for task in tasks}
    return {task.name: Carrier(task, extra_rewards) for task in tasks}
