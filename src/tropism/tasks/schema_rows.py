"""A user's own JSON Schemas: answers in JSON or YAML that must meet them.

A line of the file, with a prompt of its own, or without one:
    {"prompt": "Extract from: ...", "schema": {"type": "object", ...}}
    {"schema": {"type": "object", "properties": {"title": {"type": "string"}}, ...}}
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.json_schema import SchemaVerifier, closed
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import MEND, jsonl_rows, shown
from tropism.tasks.schema_content import says_something
from tropism.tasks.sources import SCHEMA_PARTS, DataInfo, read_rows
from tropism.tasks.splits import NotEnoughPromptsError, check_split, split_of
from tropism.tasks.structured_formats import load_json, load_yaml
from tropism.tasks.structured_verdict import blocks_of, only_body
from tropism.types import Prompt

REQUEST = (
    "Make up a value that meets this JSON Schema. Answer with {format} and nothing else.\n{schema}"
)
FORMATS = ("json", "yaml")

_logger = logging.getLogger(__name__)


class SchemaRows(Task):
    """Rows with a JSON Schema each, out of a JSONL file or of JSONSchemaBench.

    Components: ``parse`` (the answer is one JSON or YAML value, whole or as the only fenced block),
    ``valid`` (it meets the schema, with no keys that the schema does not know, and 2.0 is no
    integer) and ``pass`` (binary: valid, and it says something). Nearly half of the "easy" schemas
    of JSONSchemaBench are met by ``{}``: an answer without content, with a blank string, with
    arrays that repeat one item, or, where the row has no prompt of its own and the model is to make
    the value up, with nothing but words of the prompt, does not pass.

    Args:
        path: JSONL file, or a part of JSONSchemaBench (``Github_easy``, ...; then the columns are
            known).
        name: Identifies the task in records and metrics.
        schema_column: Column with the schema, as an object or as JSON text; dots lead into nested
            columns, as in ``request.schema``.
        prompt_column: Column with the prompt, a string or a list of ``{"role", "content"}``; rows
            without it are asked to make up a value.
        format_column: Column with the format, ``json`` or ``yaml``; null: JSON everywhere.
        validation_fraction: Share of the rows held out for validation, by a hash of the prompt.
        test_fraction: Share held out for testing.
        should_close: Forbid keys that the schema does not name, where it says nothing about them.
        should_check_formats: ``format`` (date, email, ...) is a condition.
        should_skip_unusable: Leave out rows with another format or a schema that cannot be checked,
            and say how many; else the first one is an error.
        data: Folder of the benchmarks' data, for JSONSchemaBench.
        prompt_format: How the question is put; null for a user message and nothing else.

    Raises:
        ValueError: Bad fractions. Faults of the file are raised by ``prompts``, with file and line.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary = "pass"

    def __init__(
        self,
        path: str,
        name: str = "schema_rows",
        *,
        schema_column: str = "schema",
        prompt_column: str = "prompt",
        format_column: str | None = None,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        should_close: bool = True,
        should_check_formats: bool = False,
        should_skip_unusable: bool = False,
        data: str | None = None,
        prompt_format: PromptFormat | None = None,
    ) -> None:
        if min(validation_fraction, test_fraction) < 0 or validation_fraction + test_fraction > 1:
            raise ValueError(
                f"validation_fraction={validation_fraction} and test_fraction={test_fraction}: "
                "give shares from 0 to 1, together 1 at most."
            )
        self.path = path
        self.name = name
        self.is_benchmark = path in SCHEMA_PARTS
        self.schema_column = "json_schema" if self.is_benchmark else schema_column
        self.prompt_column = prompt_column
        self.format_column = format_column
        self.should_close = should_close
        self.should_check_formats = should_check_formats
        self.should_skip_unusable = should_skip_unusable
        self.data = data
        self.prompt_format = prompt_format or PromptFormat()
        self.components = ("parse", "valid", "pass", *self.prompt_format.components)
        self._held_out: Mapping[Split, float] = {
            "validation": validation_fraction,
            "test": test_fraction,
        }

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct rows in an order that ``seed`` keys; more begin with the same ones.

        Raises:
            NotEnoughPromptsError: The split has fewer rows.
            ValueError: The file is missing, empty or malformed; file and line are named.
        """
        check_split(split)
        prompts: dict[str, Prompt] = {}
        num_unusable = 0
        for place, row in self._rows():
            try:
                prompt = self._prompt(row)
            except ValueError as error:
                if not self.should_skip_unusable:
                    raise ValueError(
                        f"{place}: {error} {MEND} Or set should_skip_unusable."
                    ) from error
                num_unusable += 1
                continue
            if split_of(prompt.id.rpartition("-")[2], self._held_out) == split:
                prompts.setdefault(prompt.id, prompt)
        if num_unusable:
            _logger.warning("%s: %d rows of %s left out", self.name, num_unusable, self.path)
        if len(prompts) < num:
            remedy = f"add rows or raise {split}_fraction"
            raise NotEnoughPromptsError(self.name, split, num, len(prompts), remedy)
        return sorted(
            prompts.values(), key=lambda row: hashlib.sha256(f"{seed}/{row.id}".encode()).digest()
        )[:num]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """``parse``, ``valid`` and ``pass``; all 0 for what does not parse."""
        columns = prompt.columns
        answer = self.prompt_format.answer(completion) or ""
        scores = {"parse": 0.0, "valid": 0.0, "pass": 0.0, **self.prompt_format.scores(completion)}
        body = only_body(answer, blocks_of(answer), columns["format"])
        if body is None:
            return scores
        is_yaml = columns["format"] == "yaml"
        value = load_yaml(body, can_flow=True) if is_yaml else load_json(body)
        if value is None:
            return scores
        is_valid = self._verifier(json.dumps(columns["schema"])).is_valid(value)
        echoed = None if columns["has_prompt"] else columns["question"]
        passes = is_valid and says_something(value, columns["schema"], echoed)
        return {**scores, "parse": 1.0, "valid": float(is_valid), "pass": float(passes)}

    def data_info(self) -> list[DataInfo]:
        """Where the schemas came from, if they are JSONSchemaBench's."""
        if not self.is_benchmark:
            return []
        return [read_rows("jsonschemabench", self.path, data=self.data)[1]]

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Where each row is, and the row."""
        if self.is_benchmark:
            rows, info = read_rows("jsonschemabench", self.path, data=self.data)
            yield from ((f"{info.place}, {row['unique_id']}", row) for row in rows)
            return
        path = Path(self.path)
        if not path.is_file():
            raise ValueError(
                f"path={self.path!r}: there is no such file, nor is it one of {SCHEMA_PARTS}."
            )
        yield from jsonl_rows(path)

    def _prompt(self, row: Any) -> Prompt:
        schema = _column(row, self.schema_column)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"column {self.schema_column!r} is {shown(schema)}, no JSON text: {error}."
                ) from error
        if not isinstance(schema, dict):
            raise ValueError(
                f"column {self.schema_column!r} is {shown(schema)}, wanted a JSON Schema: an "
                "object, or one as JSON text."
            )
        format = "json" if self.format_column is None else _column(row, self.format_column)
        if format not in FORMATS:
            raise ValueError(
                f"column {self.format_column!r} is {shown(format)}: only {FORMATS} can be checked."
            )
        self._verifier(json.dumps(schema))
        question = _column(row, self.prompt_column)
        has_prompt = question is not None
        if question is None:
            text = json.dumps(schema, ensure_ascii=False)
            question = REQUEST.format(format=format.upper(), schema=text)
        canonical = json.dumps([question, schema, format], sort_keys=True)
        id = f"{self.name}-{hashlib.sha256(canonical.encode()).hexdigest()[:16]}"
        columns = {"schema": schema, "format": format, "question": question}
        columns["has_prompt"] = has_prompt
        if isinstance(question, str) and question.strip():
            return self.prompt_format.prompt(
                id=id, task=self.name, question=question, columns=columns
            )
        if self.prompt_format != PromptFormat():
            raise ValueError("messages go to the model as they are: leave prompt_format out.")
        if not _are_messages(question):
            raise ValueError(
                f"column {self.prompt_column!r} is {shown(question)}, wanted a text that is not "
                'blank, or a list of {"role": ..., "content": ...}.'
            )
        messages = tuple({key: turn[key] for key in ("role", "content")} for turn in question)
        return Prompt(id=id, task=self.name, messages=messages, columns=columns)

    def _verifier(self, schema: str) -> SchemaVerifier:
        return _compiled(schema, self.should_close, self.should_check_formats)


@lru_cache(maxsize=4096)
def _compiled(schema: str, should_close: bool, should_check_formats: bool) -> SchemaVerifier:
    value = json.loads(schema)
    return SchemaVerifier(
        closed(value) if should_close else value, should_check_formats=should_check_formats
    )


def _column(row: Any, name: str) -> Any:
    """A column by its name, or by names with dots between; None where it is missing."""
    for part in name.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(turn, dict) for turn in value)
        and all(isinstance(turn.get(key), str) for turn in value for key in ("role", "content"))
    )
