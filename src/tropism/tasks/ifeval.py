"""IFEval: 541 prompts with instructions that a program can check (Zhou et al., arXiv 2311.07911).

    Write a resume ... include at least 12 placeholder represented by square brackets.
    detectable_content:number_placeholders {"num_placeholders": 12}

The checks are those of the package ``if-verifiable`` (the authors' own, repackaged). It is a
benchmark, with test prompts only. Counting sentences (``number_sentences``, in 46 prompts) and
words in capitals (``capital_word_frequency``, 20) needs the NLTK data ``punkt_tab``; where it is
missing, the 64 prompts that need it are left out, and 477 with 710 of the 834 instructions remain.
A warning and ``data_info`` say so.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.sources import DataInfo, read_rows
from tropism.tasks.splits import NotEnoughPromptsError, check_split
from tropism.types import Prompt

NEEDS_NLTK_DATA = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
INSTALL = "pip install if-verifiable"
DOWNLOAD = "python -m nltk.downloader punkt_tab"

_logger = logging.getLogger(__name__)


class IFEval(Task):
    """Prompts whose instructions are checked one by one, on the answer as it is (strict).

    Components: ``prompt_strict`` (binary: all instructions of the prompt are followed) and
    ``instruction_strict`` (share of them that are). The paper's instruction-level accuracy counts
    every instruction once: weight the shares by the column ``num_instructions``.

    Args:
        data: Folder of the benchmarks' data; null for TROPISM_DATA, or the hub.
        name: Identifies the task in records and metrics.
        prompt_format: How the question is put; null for a user message and nothing else.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary = "prompt_strict"

    def __init__(
        self,
        *,
        data: str | None = None,
        name: str = "ifeval",
        prompt_format: PromptFormat | None = None,
    ) -> None:
        self.data = data
        self.name = name
        self.prompt_format = prompt_format or PromptFormat()
        own = ("prompt_strict", "instruction_strict")
        self.components = (*own, *self.prompt_format.components)

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` prompts in an order that ``seed`` keys; more begin with the same ones.

        Raises:
            NotEnoughPromptsError: More than there are, or another split than ``test``.
            ValueError: The data or the package ``if-verifiable`` is missing.
        """
        check_split(split)
        rows = self._rows() if split == "test" else []
        missing = missing_checks() if rows else ()
        prompts = [self._prompt(row) for row in rows if not set(missing) & set(_ids(row))]
        if len(prompts) < num:
            remedy = "use it for tests only: it is a benchmark"
            if missing:
                remedy = f"get the NLTK data that {len(rows) - len(prompts)} need ({DOWNLOAD})"
            raise NotEnoughPromptsError(self.name, split, num, len(prompts), remedy)
        if missing:
            _logger.warning("%s: %s", self.name, self._left_out_in_words())
        prompts.sort(key=lambda prompt: hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest())
        return prompts[:num]

    def left_out(self) -> Mapping[str, int]:
        """Instruction that cannot be checked here -> number of prompts left out for it."""
        missing = set(missing_checks())
        return Counter(name for row in self._rows() for name in missing & set(_ids(row)))

    def _left_out_in_words(self) -> str:
        """How many prompts are left out, and for which instructions; empty where none is."""
        rows, missing = self._rows(), set(missing_checks())
        if not missing:
            return ""
        num = sum(not missing.isdisjoint(_ids(row)) for row in rows)
        each = ", ".join(f"{name} in {count}" for name, count in sorted(self.left_out().items()))
        return (
            f"{num} of {len(rows)} prompts left out, {len(rows) - num} asked: NLTK data is missing "
            f"for {each} ({DOWNLOAD})"
        )

    def data_info(self) -> list[DataInfo]:
        """Where the prompts came from, and which of them are left out."""
        info = read_rows("ifeval", "test", data=self.data)[1]
        return [replace(info, note=self._left_out_in_words())]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """``prompt_strict`` and ``instruction_strict``; both 0 for an empty answer."""
        answer = self.prompt_format.answer(completion) or ""
        columns = prompt.columns
        common, registry = _library()
        try:
            _, scores = common.evaluate_instructions(
                answer,
                columns["instruction_id_list"],
                columns["kwargs"],
                columns["prompt"],
                registry.INSTRUCTION_DICT,
            )
            strict, partial = scores.binary_strict, scores.partial_strict
        except RecursionError:  # its check for JSON, of a thousand brackets
            strict = partial = 0.0
        return {
            "prompt_strict": strict,
            "instruction_strict": partial,
            **self.prompt_format.scores(completion),
        }

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return read_rows("ifeval", "test", data=self.data)[0]

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        ids = _ids(row)
        if unknown := sorted(set(ids) - _library()[1].INSTRUCTION_DICT.keys()):
            raise ValueError(
                f"ifeval, key {row['key']}: if-verifiable has no checks for {unknown}."
            )
        return self.prompt_format.prompt(
            id=f"{self.name}-{row['key']}",
            task=self.name,
            question=row["prompt"],
            columns={
                "prompt": row["prompt"],
                "instruction_id_list": ids,
                "kwargs": row["kwargs"],
                "num_instructions": len(ids),
            },
        )


def _ids(row: Mapping[str, Any]) -> list[str]:
    """Names of the instructions; the copy in M-IFEval puts the language before them."""
    return [name.removeprefix("en:") for name in row["instruction_id_list"]]


@lru_cache(maxsize=1)
def missing_checks() -> tuple[str, ...]:
    """Instructions that cannot be checked, as NLTK's data is not on this machine."""
    _library()
    import nltk  # type: ignore[import-untyped]

    try:
        nltk.word_tokenize("One sentence. Another.")
    except LookupError:
        return NEEDS_NLTK_DATA
    return ()


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    """The package's modules that check; imported late, they bring in ``datasets`` and NLTK."""
    try:
        import langdetect  # type: ignore[import-untyped]
        from if_verifiable import common  # type: ignore[import-untyped]
        from if_verifiable.ifeval import instructions_registry  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(f"IFEval needs the package if-verifiable: {INSTALL}.") from error
    langdetect.DetectorFactory.seed = 0  # it draws at random
    return common, instructions_registry
