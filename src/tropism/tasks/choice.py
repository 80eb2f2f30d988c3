"""Science questions with a few options: ARC, OpenBookQA, MMLU.

A question in letters (OpenBookQA), and an answer that passes:
    There is most likely going to be fog around:
    A. the plains
    B. a marsh
    C. a desert
    D. a tundra
    Answer with the letter of the right option alone.

    B

Scored in two ways: by the answer that a model writes, and, without sampling, by which option is the
likeliest continuation (``Task.options``). Small models fail the first long before the second.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

from tropism.tasks.base import Options, Scores
from tropism.tasks.dataset import DatasetTask
from tropism.tasks.math_answers import written
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.sources import Row
from tropism.types import Prompt

Form = Literal["letters", "cloze"]
LETTERS = "ABCDEFGHIJ"
INSTRUCTION = "Answer with the letter of the right option alone."
SCIENCE = (
    "anatomy",
    "astronomy",
    "college_biology",
    "college_chemistry",
    "college_medicine",
    "college_physics",
    "conceptual_physics",
    "electrical_engineering",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_physics",
    "medical_genetics",
    "virology",
)
"""The 13 subjects of MMLU that are natural science, or applied natural science."""

# Options that speak of other options keep their place.
_SPEAKS_OF_OTHERS = re.compile(
    r"\b(?:all|none|both|neither|either|any|two) of (?:the|these|them)\b|\babove\b"
    r"|\b[A-E](?: and |, | or |/)[A-E]\b|\b(?:both|neither|either) [A-E]\b",
    re.IGNORECASE,
)
_SAID = re.compile(r"\banswer\**(?:[ \t]+is\b|[ \t]*:)[ \t:*]*(.*)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\W*(?:option\s+)?([A-J])\b(?:[).:\]]+|\s+[-–])?\W*(.*)", re.DOTALL)


class Choice(DatasetTask):
    """Questions with options.

    Args:
        form: ``letters``: the options are listed, the answer is a letter, and likelihoods are those
            of the letters. ``cloze``: the question stands alone, the answer is the text of an
            option, and likelihoods are those of the texts (how the numbers of ARC and OpenBookQA
            for base models are usually made, with ``prompt_format.style: raw``).
        prompt_format: How questions are put; chat without a system message where null.
        data: Folder of the benchmarks; null for the environment's ``TROPISM_DATA``, or the hub.
        shuffle_seed: Keys, with the question, the order of the options; null for the published one.
            Options that speak of others ("both A and B", "all of the above") keep the order.
        instruction: Behind the options of ``letters``; null for the one of the module, none with
            tags.
        validation_fraction: Share of the training rows that validation takes.
        name: Identifies the task in records and metrics.

    Raises:
        ValueError: An unknown form.
    """

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        data: str | None = None,
        shuffle_seed: int | None = 0,
        instruction: str | None = None,
        validation_fraction: float = 0.15,
        name: str,
    ) -> None:
        if form not in get_args(Form):
            raise ValueError(f"form={form!r}: choose from {get_args(Form)}.")
        super().__init__(
            name=name,
            data=data,
            prompt_format=prompt_format,
            validation_fraction=validation_fraction,
        )
        self.form, self.shuffle_seed = form, shuffle_seed
        if instruction is None:
            instruction = "" if self.prompt_format.style == "tags" else INSTRUCTION
        self.instruction = instruction

    def _columns(self, row: Row) -> dict[str, Any]:
        choices, answer = list(row["choices"]), int(row["answer_idx"])
        if not 2 <= len(choices) <= len(LETTERS) or not 0 <= answer < len(choices):
            raise ValueError(
                f"{self.name}: row {row.get('id')!r} has {len(choices)} options and answer "
                f"{answer}; wanted 2 to {len(LETTERS)} options, one of them the answer."
            )
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


def chosen_letter(text: str, choices: list[str]) -> int | None:
    """The one option that a text names by its letter; None where it names none, or several.

    A letter counts on a line of its own, behind "the answer is" or "Answer:", or in a box; alone,
    or with its own option's text behind it. "A or B" is none.
    """
    found = []
    for tail in (*_SAID.findall(text), *_BOXED.findall(text)):
        if letter := _LETTER.fullmatch(tail):
            found.append(_of_letter(letter, choices))
    for line in text.strip().splitlines():
        letter = _LETTER.fullmatch(line)
        if letter and (not letter[2] or _of_letter(letter, choices) is not None):
            found.append(_of_letter(letter, choices))
    return found[0] if len(set(found)) == 1 else None


def _of_letter(letter: re.Match[str], choices: list[str]) -> int | None:
    index, rest = LETTERS.index(letter[1]), _plain(letter[2])
    if index >= len(choices) or rest not in ("", _plain(choices[index])):
        return None
    return index


def chosen_text(text: str, choices: list[str]) -> int | None:
    """The option whose text a completion's only line is, but for punctuation.

    And but for case, where no two options differ in that alone, as genotypes do.
    """
    said = _SAID.findall(text)
    answer = said[0] if len(said) == 1 else text.strip()
    if "\n" in text.strip():
        return None
    for simplified in (_words, _plain):
        matches = [i for i, one in enumerate(choices) if simplified(one) == simplified(answer)]
        if matches:
            return matches[0] if len(matches) == 1 else None
    return None


def _words(text: str) -> str:
    return re.sub(r"[^\w+<>=%°/.-]+", " ", written(text)).strip(" .")


def _plain(text: str) -> str:
    return _words(text).casefold()


class ARC(Choice):
    """Grade-school science exams (Clark et al. 2018, 1803.05457), CC BY-SA.

    Args:
        challenge: The harder set (1,119 to train on, 1,172 to test), not the easy one (2,251 and
            2,376).
        options: As for ``Choice``.
        name: ``arc_easy`` or ``arc_challenge`` where null.
    """

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        challenge: bool = False,
        data: str | None = None,
        shuffle_seed: int | None = 0,
        instruction: str | None = None,
        validation_fraction: float = 0.15,
        name: str | None = None,
    ) -> None:
        benchmark = "arc_challenge" if challenge else "arc_easy"
        self.train_parts = ((benchmark, "train"),)  # type: ignore[misc]  # by instance
        self.test_parts = ((benchmark, "test"),)  # type: ignore[misc]
        super().__init__(
            form,
            prompt_format,
            data=data,
            shuffle_seed=shuffle_seed,
            instruction=instruction,
            validation_fraction=validation_fraction,
            name=name or benchmark,
        )


class OpenBookQA(Choice):
    """Elementary science with common sense (Mihaylov et al. 2018, 1809.02789): 4,957 and 500."""

    train_parts: ClassVar = (("openbookqa", "train"),)
    test_parts: ClassVar = (("openbookqa", "test"),)

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        data: str | None = None,
        shuffle_seed: int | None = 0,
        instruction: str | None = None,
        validation_fraction: float = 0.15,
        name: str = "openbookqa",
    ) -> None:
        super().__init__(
            form,
            prompt_format,
            data=data,
            shuffle_seed=shuffle_seed,
            instruction=instruction,
            validation_fraction=validation_fraction,
            name=name,
        )


class MMLU(Choice):
    """Exams of many subjects (Hendrycks et al. 2021, 2009.03300), by default the 13 of science.

    There is no training set: its dev and validation parts are trained on. Test questions come in an
    order that the seed keys, since the files go subject by subject.

    Args:
        subjects: Some of its 57, by the names of its files.
        form: As for ``Choice``, and so are the others.
    """

    train_parts: ClassVar = (("mmlu", "dev"), ("mmlu", "val"))
    test_parts: ClassVar = (("mmlu", "test"),)
    has_test_in_file_order: ClassVar[bool] = False

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        subjects: tuple[str, ...] = SCIENCE,
        data: str | None = None,
        shuffle_seed: int | None = 0,
        instruction: str | None = None,
        validation_fraction: float = 0.15,
        name: str = "mmlu_science",
    ) -> None:
        self.subjects = tuple(subjects)
        super().__init__(
            form,
            prompt_format,
            data=data,
            shuffle_seed=shuffle_seed,
            instruction=instruction,
            validation_fraction=validation_fraction,
            name=name,
        )

    def _train_rows(self) -> list[Row]:
        return self._of_subjects(super()._train_rows())

    def _test_rows(self) -> list[Row]:
        return self._of_subjects(super()._test_rows())

    def _of_subjects(self, rows: list[Row]) -> list[Row]:
        if unknown := sorted(set(self.subjects) - {row["subject"] for row in rows}):
            raise ValueError(f"subjects has {unknown}, which the data lack.")
        return [row for row in rows if row["subject"] in self.subjects]

    def _columns(self, row: Row) -> dict[str, Any]:
        return {**super()._columns(row), "subject": row["subject"]}
