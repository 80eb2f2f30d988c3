"""Science questions with a few options: ARC, OpenBookQA, MMLU.

A question in letters (OpenBookQA), and an answer that passes:
    There is most likely going to be fog around:
    A. the plains
    B. a marsh
    C. a desert
    D. a tundra
    Answer with the letter of the right option alone.

    B

How answers are judged is in ``choice_task``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tropism.tasks.choice_task import Choice, Form
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import Row

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


class ARC(Choice):
    """Grade-school science exams (Clark et al. 2018, 1803.05457), CC BY-SA.

    Args:
        form: ``letters`` or ``cloze``.
        prompt_format: How questions are put; chat without a system message where null.
        challenge: The harder set (1,119 to train on, 1,172 to test), not the easy one (2,251 and
            2,376).
        name: ``arc_easy`` or ``arc_challenge`` where null.
        options: As for ``Choice``.
    """

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        challenge: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        benchmark = "arc_challenge" if challenge else "arc_easy"
        self.train_parts = ((benchmark, "train"),)  # type: ignore[misc]  # by instance
        self.test_parts = ((benchmark, "test"),)  # type: ignore[misc]
        super().__init__(form, prompt_format, name=name or benchmark, **options)


class OpenBookQA(Choice):
    """Elementary science with common sense (Mihaylov et al. 2018, 1809.02789): 4,957 and 500.

    Args:
        form: ``letters`` or ``cloze``.
        prompt_format: How questions are put; chat without a system message where null.
        name: Identifies the task in records and metrics.
        options: As for ``Choice``.
    """

    train_parts: ClassVar = (("openbookqa", "train"),)
    test_parts: ClassVar = (("openbookqa", "test"),)

    def __init__(
        self,
        form: Form = "letters",
        prompt_format: PromptFormat | None = None,
        *,
        name: str = "openbookqa",
        **options: Any,
    ) -> None:
        super().__init__(form, prompt_format, name=name, **options)


class MMLU(Choice):
    """Exams of many subjects (Hendrycks et al. 2021, 2009.03300), by default the 13 of science.

    There is no training set: its dev and validation parts are trained on. Test questions come in an
    order that the seed keys, since the files go subject by subject.

    Args:
        form: ``letters`` or ``cloze``.
        prompt_format: How questions are put; chat without a system message where null.
        subjects: Some of its 57, by the names of its files.
        name: Identifies the task in records and metrics.
        options: As for ``Choice``.
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
        name: str = "mmlu_science",
        **options: Any,
    ) -> None:
        self.subjects = tuple(subjects)
        super().__init__(form, prompt_format, name=name, **options)

    def _train_rows(self) -> list[Row]:
        return self._of_subjects(super()._train_rows())

    def _test_rows(self) -> list[Row]:
        return self._of_subjects(super()._test_rows())

    def _of_subjects(self, rows: list[Row]) -> list[Row]:
        if unknown := sorted(set(self.subjects) - {row["subject"] for row in rows}):
            raise ValueError(f"subjects has {unknown}, which the data lack.")
        return [row for row in rows if row["subject"] in self.subjects]

    def _columns(self, row: Row) -> dict[str, Any] | None:
        columns = super()._columns(row)
        return columns and {**columns, "subject": row["subject"]}
