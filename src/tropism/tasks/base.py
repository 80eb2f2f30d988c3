"""What a task is: it makes prompts, and it judges answers by named components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from tropism.types import Prompt

Split = Literal["train", "validation", "test"]
Scores = Mapping[str, float | None]


@dataclass(frozen=True)
class Options:
    """Continuations of a prompt, one of which is right; compared by their log-likelihoods.

    Args:
        texts: What would follow the prompt, a leading blank included where there would be one.
        gold: Index of the right one.
    """

    texts: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        if not 0 <= self.gold < len(self.texts) or not all(self.texts):
            raise ValueError(
                f"texts={self.texts}, gold={self.gold}: give texts that are not empty, and the "
                "index of one of them."
            )


class Task(ABC):
    """Prompts of one kind, and the verifier that scores completions of them.

    A task is stateless after construction, loads nothing heavy in ``__init__`` and is safe to
    call from any process. Train, validation and test prompts are disjoint.

    Attributes:
        name: Identifies the task in records (``Prompt.task``) and in metrics.
        components: The reward components that ``score`` returns, each in [0, 1].
        primary: The binary component that evaluation reports as the pass rate.
    """

    name: str
    components: ClassVar[tuple[str, ...]]
    primary: ClassVar[str]

    @abstractmethod
    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct prompts of ``split``; the same arguments give the same prompts.

        Raises:
            ValueError: The task cannot make that many, or its data is empty or malformed.
        """

    @abstractmethod
    def score(self, prompt: Prompt, completion: str) -> Scores:
        """Judge one completion; ``async def`` is welcome, all completions are then asked at once.

        Returns:
            Every name in ``components``, with a value in [0, 1], or None where that component
            does not apply (it abstains). Malformed *model output* scores 0; an exception is a
            fault of the task and stops the run.
        """

    def gold(self, prompt: Prompt) -> str | None:
        """A right answer as a model is to write it, for SFT; None where the task knows none."""
        return None

    def options(self, prompt: Prompt) -> Options | None:
        """The answers to choose from, for scoring by log-likelihood; None where there are none."""
        return None

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """Answers that need no model, by name: what a pass rate must beat to mean anything."""
        return {}
