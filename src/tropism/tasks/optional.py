"""What a task may have besides what every task has; whoever asks looks first.

A task offers one of these by having the method, without inheriting anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, runtime_checkable

from tropism.tasks.base import Task
from tropism.tasks.extra import Carrier
from tropism.types import Prompt


@runtime_checkable
class Votable(Protocol):
    """A task whose answers can be compared with each other, so that samples can vote."""

    def answer_key(self, prompt: Prompt, completion: str) -> str | None:
        """What the completion answers, the same for equal answers; None where it answers nothing.

        It must not depend on which answer is right.
        """


@runtime_checkable
class Sourced(Protocol):
    """A task with data of its own, which has a revision and a licence."""

    def data_info(self) -> Sequence[Any]:
        """Records (dataclasses) of where each part of the data came from."""


@runtime_checkable
class Confined(Protocol):
    """A task that runs what a model wrote."""

    @property
    def sandbox_mode(self) -> str:
        """What confines it on this machine, as the sandbox's probe found; starts the sandbox."""


def sandbox_modes(tasks: Iterable[Task]) -> dict[str, str]:
    """Task name -> what confines its runs, of the tasks that run what a model wrote.

    Raises:
        SandboxError: No sandbox that holds can be had here.
    """
    own = [task.task if isinstance(task, Carrier) else task for task in tasks]
    return {task.name: task.sandbox_mode for task in own if isinstance(task, Confined)}


def data_sources(tasks: Iterable[Task]) -> Mapping[str, list[dict[str, Any]]]:
    """Task name -> place, revision, licence, ... of its data, of the tasks that say so."""
    sources = {}
    for task in tasks:
        own = task.task if isinstance(task, Carrier) else task
        if isinstance(own, Sourced):
            sources[own.name] = [_plain(info) for info in own.data_info()]
    return sources


def _plain(info: Any) -> dict[str, Any]:
    assert is_dataclass(info)
    assert not isinstance(info, type)
    return asdict(info)
