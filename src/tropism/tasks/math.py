"""Mathematics with one final answer: GSM8K, MATH, and word problems of a user's own.

A question of GSM8K, and an answer that passes:
    Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.
    How many clips did Natalia sell altogether in April and May?
    Think step by step, and end with the final answer on a line of its own: #### <number>

    In May she sold 48 / 2 = 24 clips, so 48 + 24 = 72 in all.
    #### 72

How answers are judged is in ``math_task``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

from tropism.tasks.base import Split
from tropism.tasks.math_answers import final_answer
from tropism.tasks.math_task import Comparison, MathTask
from tropism.tasks.math_writing import number_of
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_checks import TEXT, Kind, check_columns
from tropism.tasks.row_files import MEND, Row, jsonl_rows, shown
from tropism.tasks.sources import DataInfo
from tropism.tasks.splits import split_of
from tropism.types import Prompt

NUMBER_OR_TEXT = Kind(
    "a number, or a text that is not blank",
    lambda value: TEXT.fits(value) or type(value) in (int, float),  # True is no number here
)
_CALCULATION = re.compile(r"<<[^>]*>>")


class GSM8K(MathTask):
    """Grade-school word problems (Cobbe et al. 2021, 2110.14168): 7,473 to train on, 1,319 to test.

    Args:
        prompt_format: How questions are put; chat without a system message where null.
        name: Identifies the task in records and metrics.
        options: As for ``MathTask``.
    """

    comparison = "number"
    train_parts: ClassVar = (("gsm8k", "train"),)
    test_parts: ClassVar = (("gsm8k", "test"),)

    def __init__(
        self,
        prompt_format: PromptFormat | None = None,
        *,
        name: str = "gsm8k",
        **options: Any,
    ) -> None:
        super().__init__(prompt_format, name=name, **options)

    def _columns(self, row: Row) -> dict[str, Any]:
        solution, _, answer = row["answer"].rpartition("####")
        # 48/2 = <<48/2=24>>24: notes for a calculator, which no model here has.
        solution = _CALCULATION.sub("", solution).strip()
        return {"question": row["question"], "answer": answer.strip(), "solution": solution}


class MATH(MathTask):
    """Competition problems (Hendrycks et al. 2021, 2103.03874), tested on MATH-500.

    Trained on the other 4,500 problems of MATH's test set, as PRM800K was (2305.20050).

    Args:
        prompt_format: How questions are put; chat without a system message where null.
        levels: Only problems of these levels, 1 (easy) to 5; null for all.
        name: Identifies the task in records and metrics.
        options: As for ``MathTask``.

    Raises:
        ValueError: math-verify is not installed, or a level that there is not.
    """

    comparison = "latex"
    train_parts: ClassVar = (("math", "train"),)
    test_parts: ClassVar = (("math500", "test"),)

    def __init__(
        self,
        prompt_format: PromptFormat | None = None,
        *,
        levels: tuple[int, ...] | None = None,
        name: str = "math",
        **options: Any,
    ) -> None:
        if levels is not None and (not levels or not set(levels) <= set(range(1, 6))):
            raise ValueError(f"levels={levels}: choose from 1 to 5.")
        self.levels = levels
        super().__init__(prompt_format, name=name, **options)

    def _columns(self, row: Row) -> dict[str, Any] | None:
        answer = row["answer"] if "answer" in row else final_answer(row["solution"])
        if answer is None:  # seven solutions box several: both, or either?
            return None
        level = int(str(row["level"]).removeprefix("Level ").replace("?", "0"))
        return {
            "question": row["problem"],
            "answer": answer,
            "solution": row["solution"],
            "level": level,
        }

    def _questions(self, split: Split) -> list[Prompt]:
        found = super()._questions(split)
        if self.levels is None:
            return found
        return [prompt for prompt in found if prompt.columns["level"] in self.levels]


class WordProblems(MathTask):
    """Problems out of a user's JSONL file.

    Args:
        path: JSONL file of the training rows, and of held-out ones that have no file of their own.
        question_column: Column with the question.
        answer_column: Column with the final answer alone; a number may be one of JSON.
        solution_column: Column with a solution, for SFT; null for none.
        comparison: ``number`` or ``latex`` (math-verify).
        validation_path: JSONL file of the validation rows.
        test_path: JSONL file of the test rows.
        validation_fraction: Share of ``path`` for validation where that has no file.
        test_fraction: Share of ``path`` for testing where that has no file.
        prompt_format: How questions are put; chat without a system message where null.
        instruction: Behind every question; null for the one of the module, none with tags.
        name: Identifies the task in records and metrics.

    Raises:
        ValueError: Fractions or comparison that cannot be; math-verify is wanted and not installed.
            Faults of the files are raised by ``prompts``, with file and line.
    """

    def __init__(
        self,
        path: str,
        *,
        question_column: str = "question",
        answer_column: str = "answer",
        solution_column: str | None = None,
        comparison: Comparison = "number",
        validation_path: str | None = None,
        test_path: str | None = None,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.0,
        prompt_format: PromptFormat | None = None,
        instruction: str | None = None,
        name: str = "word_problems",
    ) -> None:
        if comparison not in get_args(Comparison):
            raise ValueError(f"comparison={comparison!r}: choose from {get_args(Comparison)}.")
        if not 0 <= test_fraction < 1 - validation_fraction:
            raise ValueError(
                f"validation_fraction={validation_fraction} and test_fraction={test_fraction}: "
                "give shares from 0 that leave something to train on."
            )
        self.comparison = comparison
        self.question_column, self.answer_column = question_column, answer_column
        self.solution_column = solution_column
        self._paths = {"train": path, "validation": validation_path, "test": test_path}
        self._held_out: Mapping[Split, float] = {
            "validation": 0.0 if validation_path else validation_fraction,
            "test": 0.0 if test_path else test_fraction,
        }
        super().__init__(
            prompt_format,
            name=name,
            instruction=instruction,
            validation_fraction=validation_fraction,
        )

    def _questions(self, split: Split) -> list[Prompt]:
        own = self._paths[split]
        if split != "train" and own is not None:
            return list(self._of_parts(self._load(own)).values())
        assert self._paths["train"] is not None
        kept_apart = {
            key
            for path in (self._paths["validation"], self._paths["test"])
            if path is not None
            for key in self._of_parts(self._load(path))
        }
        shared = self._of_parts(self._load(self._paths["train"]))
        return [
            prompt
            for key, prompt in shared.items()
            if key not in kept_apart and split_of(key, self._held_out) == split
        ]

    def _load(self, path: str) -> list[Row]:
        if not Path(path).is_file():
            raise ValueError(f"{path}: there is no such file.")
        rows: list[Row] = []
        seen: dict[str, tuple[str, str]] = {}
        for place, row in jsonl_rows(Path(path)):
            try:
                columns = self._columns(row)
            except ValueError as error:
                raise ValueError(f"{place}: {error} {MEND}") from error
            first, answer = seen.setdefault(columns["question"], (place, columns["answer"]))
            if answer != columns["answer"]:
                raise ValueError(
                    f"{place}: the question of {first.rpartition(', ')[2]} again, with the answer "
                    f"{shown(columns['answer'])} in place of {shown(answer)}. Keep one of the two."
                )
            rows.append(row)
        return rows

    def _columns(self, row: Row) -> dict[str, Any]:
        wanted = {self.question_column: TEXT, self.answer_column: NUMBER_OR_TEXT}
        if self.solution_column is not None:
            wanted[self.solution_column] = TEXT
        check_columns(row, wanted)
        answer = str(row[self.answer_column]).strip()
        if self.comparison == "number" and number_of(answer) is None:
            raise ValueError(
                f"column {self.answer_column!r} is {shown(row[self.answer_column])}, wanted one "
                "number; comparison='latex' takes formulas too."
            )
        return {
            "question": row[self.question_column],
            "answer": answer,
            "solution": None if self.solution_column is None else row[self.solution_column],
        }

    def data_info(self) -> list[DataInfo]:
        """None: the file is the user's own."""
        return []
