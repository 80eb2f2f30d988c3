"""What tasks on published data share: rows by split, prompts in a stable order, records of both.

1. The test split is the benchmark's own. Validation is cut out of its training rows by a hash of
   each question, so that adding rows moves none.
2. A question that stands in the test set is never trained on, nor validated on.
3. Test questions come in the order of the file, whatever the seed, so that the first 200 are the
   same for everyone; the others in an order that the seed keys.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tropism.tasks.base import Split, Task
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import Row
from tropism.tasks.sources import DataInfo, read_rows
from tropism.tasks.splits import NotEnoughPromptsError, check_split, split_of
from tropism.types import Prompt


class DatasetTask(Task):
    """Questions with one right answer out of a published benchmark.

    Components: ``answered`` (there is exactly one final answer, of the kind that is asked for),
    ``accuracy`` (it is right) and those of the prompt format.

    Args:
        name: Identifies the task in records and metrics.
        data: Folder of the benchmarks; null for the environment's ``TROPISM_DATA``, or the hub.
        prompt_format: How questions are put; chat without a system message where null.
        validation_fraction: Share of the training rows that validation takes.

    Raises:
        ValueError: A fraction outside [0, 1).
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary: ClassVar[str] = "accuracy"
    train_parts: ClassVar[tuple[tuple[str, str], ...]] = ()
    test_parts: ClassVar[tuple[tuple[str, str], ...]] = ()
    has_test_in_file_order: ClassVar[bool] = True

    def __init__(
        self,
        *,
        name: str,
        data: str | None = None,
        prompt_format: PromptFormat | None = None,
        validation_fraction: float = 0.1,
    ) -> None:
        if not 0 <= validation_fraction < 1:
            raise ValueError(
                f"validation_fraction={validation_fraction}: give a share of the training rows "
                "from 0 that leaves something to train on."
            )
        self.name, self.data = name, data
        self.prompt_format = PromptFormat() if prompt_format is None else prompt_format
        self.components = ("answered", "accuracy", *self.prompt_format.components)
        self.validation_fraction = validation_fraction

    @abstractmethod
    def _columns(self, row: Row) -> dict[str, Any] | None:
        """What judging needs, with ``question`` among it; None where the row is of no use."""

    @abstractmethod
    def _text(self, columns: Mapping[str, Any]) -> str:
        """The question as it is put, instructions included."""

    def _key(self, columns: Mapping[str, Any]) -> str:
        """What makes two rows the same question."""
        return str(columns["question"])

    def data_info(self) -> list[DataInfo]:
        """Where the data come from: place, revision, licence, hash."""
        parts = dict.fromkeys((*self.train_parts, *self.test_parts))
        return [read_rows(*part, data=self.data)[1] for part in parts]

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct questions; more begin with the same ones.

        Raises:
            NotEnoughPromptsError: The split has fewer.
            ValueError: The data are missing or malformed.
        """
        check_split(split)
        found = self._questions(split)
        if len(found) < num:
            remedy = {
                "train": "lower validation_fraction",
                "validation": "raise validation_fraction",
                "test": "take another benchmark",
            }[split]
            raise NotEnoughPromptsError(self.name, split, num, len(found), remedy)
        if split != "test" or not self.has_test_in_file_order:
            found.sort(key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest())
        return found[:num]

    def _questions(self, split: Split) -> list[Prompt]:
        """All prompts of a split in the order of the file, each question once."""
        test = self._of_parts(self._test_rows())
        if split == "test":
            return list(test.values())
        return [
            prompt
            for key, prompt in self._of_parts(self._train_rows()).items()
            if key not in test and split_of(key, {"validation": self.validation_fraction}) == split
        ]

    def _train_rows(self) -> list[Row]:
        return [row for part in self.train_parts for row in read_rows(*part, data=self.data)[0]]

    def _test_rows(self) -> list[Row]:
        return [row for part in self.test_parts for row in read_rows(*part, data=self.data)[0]]

    def _of_parts(self, rows: Sequence[Row]) -> dict[str, Prompt]:
        prompts: dict[str, Prompt] = {}
        for row in rows:
            columns = self._columns(row)
            if columns is None:
                continue
            key = self._key(columns)
            if key not in prompts:
                prompts[key] = self.prompt_format.prompt(
                    id=f"{self.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}",
                    task=self.name,
                    question=self._text(columns),
                    columns=columns,
                )
        return prompts

    def _judged(self, completion: str) -> str | None:
        """The text that is judged: a base model's next question is none of it."""
        text = self.prompt_format.answer(completion)
        if text is not None and self.prompt_format.style == "raw":
            opening = self.prompt_format.template.partition("{question}")[0].strip()
            return text.partition(opening)[0] if opening else text
        return text

    def _scores(self, completion: str, *, answered: bool, is_right: bool) -> dict[str, float]:
        return {
            "answered": float(answered),
            "accuracy": float(is_right),
            **self.prompt_format.scores(completion),
        }
