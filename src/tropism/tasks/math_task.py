"""What GSM8K, MATH and a user's own problems share: from an answer to a verdict.

One final answer is extracted first (``math_answers``), then compared: plain numbers by value, LaTeX
by math-verify in processes of its own (``math_verifier``).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tropism.tasks.base import Scores
from tropism.tasks.dataset import DatasetTask
from tropism.tasks.math_answers import (
    asks_percent,
    calculations,
    claims_more,
    final_answer,
    last_number,
)
from tropism.tasks.math_verifier import check_installed, shared_verifier
from tropism.tasks.math_writing import number_of, written, written_alike
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import Row
from tropism.types import Prompt

_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|leq|geq|leqslant|geqslant|ne|neq)(?![A-Za-z])")
Comparison = Literal["number", "latex"]
INSTRUCTIONS: Mapping[Comparison, str] = {
    "number": (
        "Think step by step, and end with the final answer on a line of its own: #### <number>"
    ),
    "latex": "Think step by step, and put the final answer within \\boxed{}.",
}


class MathTask(DatasetTask):
    """Problems with one final answer, compared as a number or as LaTeX.

    Args:
        prompt_format: How questions are put; chat without a system message where null.
        instruction: Behind every question; null for the one that fits the comparison, or for none
            where tags say where the answer is to stand.
        options: As for ``DatasetTask``.

    Raises:
        ValueError: math-verify is needed and not installed.
    """

    comparison: Comparison

    def __init__(
        self,
        prompt_format: PromptFormat | None = None,
        *,
        instruction: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(prompt_format=prompt_format, **options)
        has_tags = self.prompt_format.style == "tags"
        self.instruction = (
            instruction
            if instruction is not None
            else ("" if has_tags else INSTRUCTIONS[self.comparison])
        )
        if self.comparison == "latex":
            check_installed()

    @abstractmethod
    def _columns(self, row: Row) -> dict[str, Any] | None:
        """``question``, ``answer`` and ``solution`` (or None)."""

    def _text(self, columns: Mapping[str, Any]) -> str:
        return f"{columns['question']}\n{self.instruction}".strip()

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """All 0 or 1; an awaitable of them where math-verify has to be asked."""
        answer, gold = self._answer(prompt, completion), prompt.columns["answer"]
        can_be_percent = asks_percent(prompt.columns["question"])
        if answer is None:
            return self._scores(completion, answered=False, is_right=False)
        if claims_more(answer, gold, can_be_percent=can_be_percent):
            return self._scores(completion, answered=True, is_right=False)
        if self.comparison == "number" or written_alike(answer, gold):
            is_right = written_alike(answer, gold)
            return self._scores(completion, answered=True, is_right=is_right)
        return self._later(completion, gold, answer)  # type: ignore[return-value]  # scoring awaits

    async def _later(self, completion: str, gold: str, answer: str) -> Scores:
        right, mine = written(gold), written(answer)
        same = shared_verifier().same_later
        is_right = await same(right, mine)
        if not is_right and _INEQUALITY.search(mine) and not _INEQUALITY.search(right):
            is_right = await same(mine, right)  # x <= 2 for (-oo, 2]: seen this way round only
        for side in calculations(answer, gold) if is_right else ():
            is_right = is_right and await same(right, side)
        return self._scores(completion, answered=True, is_right=is_right)

    def _answer(self, prompt: Prompt, completion: str) -> str | None:
        text = self._judged(completion)
        answer = None if text is None else final_answer(text)
        if answer is None or self.comparison == "latex":
            return answer
        can_be_percent = asks_percent(prompt.columns["question"])
        return None if number_of(answer, can_be_percent=can_be_percent) is None else answer

    def answer_key(self, prompt: Prompt, completion: str) -> str | None:
        """What samples vote by: the value of a number, or the answer without what is only look."""
        answer = self._answer(prompt, completion)
        if answer is None:
            return None
        number = number_of(answer, can_be_percent=True)
        return written(answer) if number is None else str(number)

    def gold(self, prompt: Prompt) -> str | None:
        """The solution with its final answer in the form that is asked for."""
        solution, answer = prompt.columns["solution"], prompt.columns["answer"]
        marked = self._marked(answer)
        reasoning = solution or f"The final answer is {answer}."
        if self.prompt_format.style == "tags":
            return self.prompt_format.gold(answer, reasoning)
        if solution is None:
            return self.prompt_format.gold(marked, "")
        found = final_answer(solution)
        is_whole = found is not None and written_alike(found, answer)
        return self.prompt_format.gold(solution if is_whole else f"{solution}\n{marked}", "")

    def _marked(self, answer: str) -> str:
        if self.comparison == "number":
            return f"#### {answer}"
        return f"The final answer is $\\boxed{{{answer}}}$."

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """The question's last number, always 1, and the question as it was put."""

        def answered(prompt: Prompt, answer: str) -> str:
            has_tags = self.prompt_format.style == "tags"
            return self.prompt_format.gold(answer if has_tags else self._marked(answer), "None.")

        return {
            "last number": lambda prompt: answered(prompt, last_number(prompt.columns["question"])),
            "one": lambda prompt: answered(prompt, "1"),
            "echo": lambda prompt: self.prompt_format.gold(self._text(prompt.columns), "None."),
        }
