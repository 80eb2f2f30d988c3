"""Reasoning Gym: procedural questions with checkable answers, scored strictly.

A sample of `chain_sum` and an answer that passes:
    State the final answer to the following arithmetic problem: 4 + 3 =
    End with one line: Answer: <your answer>
    4 and 3 make 7.
    Answer: 7

Differs from the package's own scores: they are partial, and read anything in the text. Here one
final answer is extracted and compared strictly; only data sets whose questions have several right
answers (``SEVERAL_ANSWERS``, read one by one) are judged by their own ``score_answer``, at 1.0.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.final_answer import extract_answer, one_answer, same_answer
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.reasoning_datasets import HASH_DEPENDENT, REFUSED, SEVERAL_ANSWERS
from tropism.tasks.splits import NotEnoughPromptsError, check_split, split_of
from tropism.types import Prompt

INSTRUCTION = "End with one line: Answer: <your answer>"
_PATIENCE = 2_000
"""So many questions without a new one for the split (a tenth of all, or more) mean that there is
none left."""


class Reasoning(Task):
    """One data set of Reasoning Gym.

    Components: ``accuracy`` (the one answer is right) and those of the prompt format. Where the
    answer stands is up to that:

        chat   behind the one ``Answer:`` line, which the question asks for, with nothing after it;
               ``format`` says whether there is one
        tags   in the answer block, alone
        raw    the first line, as behind the ``Answer:`` that ends the default template (base models
               go on with questions of their own)

    Args:
        dataset: A data set of reasoning-gym that is not in ``REFUSED``.
        config: Its configuration, without ``seed`` and ``size``, which are set from the split.
        name: Identifies the task in records and metrics; the data set's name by default.
        prompt_format: How questions are put; chat without a system message where null.

    Raises:
        ValueError: Unknown or refused data set; one that needs ``PYTHONHASHSEED``; a configuration
            that it does not accept.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary: ClassVar[str] = "accuracy"

    def __init__(
        self,
        dataset: str = "chain_sum",
        config: dict[str, Any] | None = None,
        name: str | None = None,
        prompt_format: PromptFormat | None = None,
    ) -> None:
        self.dataset = dataset
        self.config = dict(config or {})
        self.name = name or dataset
        self.prompt_format = PromptFormat() if prompt_format is None else prompt_format
        self._has_line = self.prompt_format.style == "chat"
        own = ("format", "accuracy") if self._has_line else ("accuracy",)
        self.components = (*own, *self.prompt_format.components)
        self._check()

    def _check(self) -> None:
        from reasoning_gym.factory import DATASETS

        if self.dataset in REFUSED:
            raise ValueError(
                f"dataset={self.dataset!r} is refused: {REFUSED[self.dataset]}. Choose another."
            )
        hash_seed = os.environ.get("PYTHONHASHSEED", "random")
        if self.dataset in HASH_DEPENDENT and not hash_seed.isdigit():
            raise ValueError(
                f"dataset={self.dataset!r} makes other questions in each process (they depend on "
                f"Python's hashes of strings), so that no run could be resumed or repeated: start "
                f"with PYTHONHASHSEED=0 in the environment (it is {hash_seed!r}), or choose "
                "another."
            )
        if self.dataset not in DATASETS:
            usable = sorted(DATASETS.keys() - REFUSED.keys())
            close = difflib.get_close_matches(self.dataset, usable, n=3, cutoff=0.5)
            hint = f"Did you mean {', '.join(close)}?" if close else f"Choose from {usable}."
            raise ValueError(f"dataset={self.dataset!r} is not in reasoning-gym. {hint}")
        known = {field.name for field in fields(DATASETS[self.dataset][1])} - {"seed", "size"}
        if unknown := sorted(self.config.keys() - known):
            raise ValueError(
                f"config has {unknown}, which {self.dataset!r} does not take here; "
                f"choose from {sorted(known)}."
            )
        self._make(seed=0)

    def _make(self, seed: int) -> Any:
        """The data set of one seed."""
        from reasoning_gym.factory import create_dataset

        try:
            return create_dataset(self.dataset, **copy.deepcopy(self.config), seed=seed)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"config={self.config} is refused by the data set {self.dataset!r}: {error}"
            ) from error

    @cached_property
    def _scorer(self) -> Callable[[str, Mapping[str, Any]], float]:
        scorer: Callable[[str, Mapping[str, Any]], float] = self._make(seed=0).score_answer
        return scorer

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct prompts; more of them begin with the same ones.

        Which split a question belongs to is a hash of its text, so that none is in two splits.

        Raises:
            NotEnoughPromptsError: The configuration has too few distinct questions.
            ValueError: Unknown split, or a question has no answer.
        """
        check_split(split)
        key = hashlib.sha256(f"{self.dataset}/{split}/{seed}".encode()).digest()
        entries = self._entries(seed=int.from_bytes(key[:4]) >> 1)
        prompts: dict[str, Prompt] = {}
        num_misses = 0
        while len(prompts) < num and num_misses < _PATIENCE:
            entry = next(entries)
            num_misses += 1
            if split_of(entry["question"]) != split:
                continue
            prompt = self._prompt(entry)
            if prompt.id not in prompts:
                prompts[prompt.id] = prompt
                num_misses = 0
        if len(prompts) < num:
            raise NotEnoughPromptsError(
                self.name, split, num, len(prompts), "widen its config (more or larger numbers)"
            )
        return list(prompts.values())

    def _entries(self, seed: int) -> Iterator[Mapping[str, Any]]:
        """Questions and answers without end, by a data set of the next seed where one is used up.

        Most data sets make question i from ``seed + i`` alone, so that they go on as one would.
        """
        while True:
            source = self._make(seed)
            for index in range(len(source)):
                try:
                    with _seeded(seed + index):
                        entry = source[index]
                except IndexError as error:
                    raise ValueError(
                        f"dataset={self.dataset!r} with config={self.config} has no question "
                        f"{index} ({error}). Widen its config, or choose another data set."
                    ) from error
                yield entry
            seed += len(source)

    def _prompt(self, entry: Mapping[str, Any]) -> Prompt:
        question, answer = entry["question"], entry["answer"]
        has_answer = isinstance(answer, str) and bool(answer.strip())
        if not has_answer and self.dataset not in SEVERAL_ANSWERS:
            raise ValueError(
                f"dataset={self.dataset!r} gives answer={answer!r} to {question[:80]!r}: there is "
                "nothing to compare with. Choose another data set."
            )
        columns: dict[str, Any] = {"answer": answer if has_answer else None}
        if self.dataset in SEVERAL_ANSWERS:
            columns["entry"] = dict(entry)
        return self.prompt_format.prompt(
            id=f"{self.name}-{hashlib.sha256(question.encode()).hexdigest()[:16]}",
            task=self.name,
            question=f"{question}\n{INSTRUCTION}" if self._has_line else question,
            columns=columns,
        )

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """The components, each 0 or 1 but for ``tag_count``."""
        gold: str | None = prompt.columns["answer"]
        spans_lines = gold is not None and "\n" in gold.strip()
        answer = self._extract(completion, can_span_lines=spans_lines)
        is_right = answer is not None and gold is not None and same_answer(answer, gold)
        if answer is not None and not is_right and "entry" in prompt.columns:
            is_right = self._accepts(answer, prompt.columns["entry"])
        scores = {"accuracy": float(is_right), **self.prompt_format.scores(completion)}
        if self._has_line:
            scores["format"] = float(answer is not None)
        return scores

    def _extract(self, completion: str, *, can_span_lines: bool) -> str | None:
        judged = self.prompt_format.answer(completion)
        if judged is None:
            return None
        if self._has_line:
            return extract_answer(judged, can_span_lines=can_span_lines)
        if self.prompt_format.style == "raw":
            judged = judged.strip().split("\n\n" if can_span_lines else "\n")[0]
        return one_answer(judged, can_span_lines=can_span_lines)

    def gold(self, prompt: Prompt) -> str | None:
        """The data set's answer in the prompt format's form; None where it gives none."""
        answer: str | None = prompt.columns["answer"]
        if answer is None:
            return None
        written = f"Answer: {answer}" if self._has_line else answer
        return self.prompt_format.gold(written, reasoning=f"The answer is {answer}.")

    def _accepts(self, answer: str, entry: Mapping[str, Any]) -> bool:
        """Whether the data set's own scorer gives full marks."""
        try:
            # A copy, since one of these scorers writes into the entry.
            return self._scorer(answer, copy.deepcopy(dict(entry))) >= 1.0
        except ValueError:  # what int() says of text that is no number; one of them lets it out
            return False


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Some data sets draw from Python's global generator too; nobody else's numbers change."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
