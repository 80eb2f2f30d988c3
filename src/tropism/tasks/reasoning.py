"""Reasoning Gym: procedural questions with checkable answers, scored strictly.

A sample of `chain_sum` and an answer that passes:
    State the final answer to the following arithmetic problem: 4 + 3 =
    End with one line: Answer: <your answer>
    4 and 3 make 7.
    Answer: 7

Differs from the package's own scores: they are partial, and read anything in the text. Here one
final answer is extracted and compared strictly; only data sets whose questions have several right
answers, listed below and read one by one, are judged by their own ``score_answer``, at 1.0.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from functools import cached_property
from typing import Any, ClassVar

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.splits import NotEnoughPromptsError, check_split, split_of
from tropism.types import Prompt

_RUNS_MODEL_TEXT = "its score_answer runs model text as code"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "binary_matrix",
            "countdown",
            "intermediate_integration",
            "n_queens",
            "polynomial_multiplication",
            "puzzle24",
            "simple_integration",
            "spiral_matrix",
            "string_insertion",
        ),
        _RUNS_MODEL_TEXT,
    ),
    "codeio": "making its questions executes code out of its data file",
    "composite": "it can hold any other data set; list several tasks instead",
    "propositional_logic": "its answer is None",
}
"""Data sets that must not be used in the trainer's process, and why."""

SEVERAL_ANSWERS = frozenset(
    {
        "cryptarithm",
        "graph_color",
        "group_anagrams",
        "jugs",
        "kakurasu",
        "knight_swap",
        "knights_knaves",
        "palindrome_generation",
        "palindrome_partitioning",
        "prime_factorization",
        "quantum_lock",
        "shortest_path",
        "sokoban",
        "tower_of_hanoi",
        "word_ladder",
    }
)
"""Data sets whose questions have several right answers, and whose ``score_answer`` is safe."""

INSTRUCTION = "End with one line: Answer: <your answer>"
MAX_ANSWER_CHARACTERS = 2_000
_PATIENCE = 2_000
"""So many questions without a new one for the split (a tenth of all, or more) mean that there is
none left."""
_MARKER = re.compile(r"^[ \t]*answer:", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


class Reasoning(Task):
    """One data set of Reasoning Gym.

    Components: ``format`` (exactly one ``Answer:`` line, with the answer and nothing after it) and
    ``accuracy`` (that answer is right; 0 without the format).

    Args:
        dataset: A data set of reasoning-gym that is not in ``REFUSED``.
        config: Its configuration, without ``seed`` and ``size``, which are set from the split.
        name: Identifies the task in records and metrics; the data set's name by default.

    Raises:
        ValueError: Unknown or refused data set; a configuration that it does not accept.
    """

    components: ClassVar[tuple[str, ...]] = ("format", "accuracy")
    primary: ClassVar[str] = "accuracy"

    def __init__(
        self,
        dataset: str = "chain_sum",
        config: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.dataset = dataset
        self.config = dict(config or {})
        self.name = name or dataset
        self._check()

    def _check(self) -> None:
        from reasoning_gym.factory import DATASETS

        if self.dataset in REFUSED:
            raise ValueError(
                f"dataset={self.dataset!r} is refused: {REFUSED[self.dataset]}. Choose another."
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
        source = self._make(seed=int.from_bytes(key[:4]) >> 1)
        prompts: dict[str, Prompt] = {}
        num_misses = index = 0
        while len(prompts) < num and num_misses < _PATIENCE:
            entry = source[index]
            index += 1
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
        return Prompt(
            id=f"{self.name}-{hashlib.sha256(question.encode()).hexdigest()[:16]}",
            task=self.name,
            messages=({"role": "user", "content": f"{question}\n{INSTRUCTION}"},),
            columns=columns,
        )

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """``format`` and ``accuracy``, both 0 or 1."""
        gold: str | None = prompt.columns["answer"]
        spans_lines = gold is not None and "\n" in gold.strip()
        answer = extract_answer(completion, can_span_lines=spans_lines)
        if answer is None:
            return {"format": 0.0, "accuracy": 0.0}
        is_right = gold is not None and same_answer(answer, gold)
        if not is_right and "entry" in prompt.columns:
            is_right = self._accepts(answer, prompt.columns["entry"])
        return {"format": 1.0, "accuracy": float(is_right)}

    def gold(self, prompt: Prompt) -> str | None:
        """The data set's answer behind ``Answer:``; None where it gives none."""
        answer: str | None = prompt.columns["answer"]
        return None if answer is None else f"Answer: {answer}"

    def _accepts(self, answer: str, entry: Mapping[str, Any]) -> bool:
        """Whether the data set's own scorer gives full marks."""
        try:
            # A copy, since one of these scorers writes into the entry.
            return self._scorer(answer, copy.deepcopy(dict(entry))) >= 1.0
        except ValueError:  # what int() says of text that is no number; one of them lets it out
            return False


def extract_answer(completion: str, *, can_span_lines: bool = False) -> str | None:
    """What follows the only ``Answer:`` line-start of a completion, up to its end.

    None without such a line, with several, with nothing behind it, or with further lines behind
    it (unless ``can_span_lines``, for grids).
    """
    markers = list(_MARKER.finditer(completion))
    if len(markers) != 1:
        return None
    answer = completion[markers[0].end() :].strip()
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    return answer if can_span_lines or "\n" not in answer else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers are the same but for case, spacing, markdown emphasis and a final stop.

    Plain numbers are compared by value, thousands separators allowed ("1,000", "1000.0"). Units,
    words around the answer and alternatives ("41 or 42") make it another answer.
    """
    answer, gold = _normalised(answer), _normalised(gold)
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(gold):
        return Decimal(answer.replace(",", "")) == Decimal(gold.replace(",", ""))
    return answer == gold


def _normalised(answer: str) -> str:
    text = unicodedata.normalize("NFKC", answer).casefold().strip()
    for mark in ("**", "`", '"'):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)]
    text = text.removesuffix(".")
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
