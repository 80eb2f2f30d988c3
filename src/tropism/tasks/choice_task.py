"""What ARC, OpenBookQA and MMLU share: options in an order, letters or texts, likelihoods.

Scored in two ways: by the answer that a model writes, and, without sampling, by which option is the
likeliest continuation (``Task.options``). Small models fail the first long before the second.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from tropism.tasks.base import Options, Scores
from tropism.tasks.choice_answers import LETTERS, chosen_letter, chosen_text
from tropism.tasks.dataset import DatasetTask
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import Row
from tropism.types import Prompt

Form = Literal["letters", "cloze"]
INSTRUCTION = "Answer with the letter of the right option alone."

# Options that speak of other options keep their place.
_SPEAKS_OF_OTHERS = re.compile(
    r"\b(?:all|none|both|neither|either|any|two) of (?:the|these|them)\b|\babove\b"
    r"|\b[A-E](?: and |, | or |/)[A-E]\b|\b(?:both|neither|either) [A-E]\b",
    re.IGNORECASE,
)


class Choice(DatasetTask):
    """Questions with options.

    Args:
        form: ``letters``: the options are listed, the answer is a letter, and likelihoods are those
            of the letters. ``cloze``: the question stands alone, the answer is the text of an
            option, and likelihoods are those of the texts (how the numbers of ARC and OpenBookQA
            for base models are usually made, with ``prompt_format.style: raw``).
        prompt_format: How questions are put; chat without a system message where null.
        shuffle_seed: Keys, with the question, the order of the options; null for the published one.
            Options that speak of others ("both A and B", "all of the above") keep the order.
        instruction: Behind the options of ``letters``; null for the one of the module, none with
            tags.
        validation_fraction: Share of the training rows that validation takes.
        options: As for ``DatasetTask``.

    Raises:
        ValueError: An unknown form.
    """

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        shuffle_seed: int | None = 0,
        instruction: str | None = None,
        validation_fraction: float = 0.15,
        **options: Any,
    ) -> None:
        if form not in get_args(Form):
            raise ValueError(f"form={form!r}: choose from {get_args(Form)}.")
        super().__init__(
            prompt_format=prompt_format, validation_fraction=validation_fraction, **options
        )
        self.form, self.shuffle_seed = form, shuffle_seed
        if instruction is None:
            instruction = "" if self.prompt_format.style == "tags" else INSTRUCTION
        self.instruction = instruction

    def _columns(self, row: Row) -> dict[str, Any] | None:
        choices, answer = list(row["choices"]), int(row["answer_idx"])
        if not 2 <= len(choices) <= len(LETTERS) or not 0 <= answer < len(choices):
            raise ValueError(
                f"{self.name}: row {row.get('id')!r} has {len(choices)} options and answer "
                f"{answer}; wanted 2 to {len(LETTERS)} options, one of them the answer."
            )
        if choices.count(choices[answer]) > 1:  # five rows of MMLU: two options are right
            return None
        order = self._order(row["question"], choices)
        return {
            "question": row["question"],
            "choices": [choices[i] for i in order],
            "answer_idx": order.index(answer),
        }

    def _order(self, question: str, choices: list[str]) -> list[int]:
        order = list(range(len(choices)))
        if self.shuffle_seed is None or any(map(_SPEAKS_OF_OTHERS.search, choices)):
            return order

        def key(i: int) -> bytes:
            return hashlib.sha256(f"{self.shuffle_seed}/{question}/{i}".encode()).digest()

        return sorted(order, key=key)

    def _key(self, columns: Mapping[str, Any]) -> str:
        return "\n".join((columns["question"], *sorted(columns["choices"])))

    def _text(self, columns: Mapping[str, Any]) -> str:
        if self.form == "cloze":
            return str(columns["question"])
        options = [
            f"{letter}. {text}" for letter, text in zip(LETTERS, columns["choices"], strict=False)
        ]
        return "\n".join((columns["question"], *options, self.instruction)).strip()

    def options(self, prompt: Prompt) -> Options | None:
        """Letters or texts, as ``form`` says; None with tags, where reasoning comes first."""
        if self.prompt_format.style == "tags":
            return None
        choices = prompt.columns["choices"]
        answers = choices if self.form == "cloze" else LETTERS[: len(choices)]
        texts = tuple(self.prompt_format.gold(answer, "") for answer in answers)
        return Options(texts, prompt.columns["answer_idx"])

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """All 0 or 1."""
        chosen = self._chosen(prompt, completion)
        is_right = chosen == prompt.columns["answer_idx"]
        return self._scores(completion, answered=chosen is not None, is_right=is_right)

    def _chosen(self, prompt: Prompt, completion: str) -> int | None:
        text = self._judged(completion)
        if text is None:
            return None
        choices = prompt.columns["choices"]
        return chosen_text(text, choices) if self.form == "cloze" else chosen_letter(text, choices)

    def answer_key(self, prompt: Prompt, completion: str) -> str | None:
        """What samples vote by: the letter, also of a text that was given in its place."""
        chosen = self._chosen(prompt, completion)
        return None if chosen is None else LETTERS[chosen]

    def gold(self, prompt: Prompt) -> str | None:
        """The right letter, or its text in ``cloze``."""
        return self._answered(prompt, prompt.columns["answer_idx"])

    def _answered(self, prompt: Prompt, choice: int) -> str:
        text = prompt.columns["choices"][choice]
        answer = text if self.form == "cloze" else LETTERS[choice]
        return self.prompt_format.gold(answer, f"The option that fits is: {text}")

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """Always the first option, and the longest one."""

        def longest(prompt: Prompt) -> str:
            lengths = [len(choice) for choice in prompt.columns["choices"]]
            return self._answered(prompt, lengths.index(max(lengths)))

        return {"first": lambda prompt: self._answered(prompt, 0), "longest": longest}
