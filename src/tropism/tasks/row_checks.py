"""What a row of each benchmark must have, so that a damaged file is refused, and its fault named.

The columns are those of ``sources``; a file from elsewhere with other names, answer keys that are
off by one or numbers in the place of texts stops here, before any model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tropism.tasks.math_writing import number_of
from tropism.tasks.row_files import MEND, Row, shown

MAX_OPTIONS = 10
_LEVEL = re.compile(r"(?:Level )?[1-5?]")


@dataclass(frozen=True)
class Kind:
    """What a column may hold: in words, and as a test."""

    wanted: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))


TEXT = Kind("a text that is not blank", _is_text)
MAYBE_BLANK = Kind("a text", lambda value: isinstance(value, str))
WHOLE = Kind("a whole number", _is_whole)
TEXTS = Kind("a list of texts that are not blank", _are_texts)
OPTIONS = Kind(
    f"a list of 2 to {MAX_OPTIONS} texts that are not blank",
    lambda value: _are_texts(value) and 2 <= len(value) <= MAX_OPTIONS,
)
OBJECTS = Kind(
    "a list of JSON objects",
    lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
)
SCHEMA = Kind("a JSON Schema (an object)", lambda value: isinstance(value, dict))
ANY_SCHEMA = Kind("a JSON Schema", lambda value: isinstance(value, dict | bool))
LEVEL = Kind("a level from 1 to 5", lambda value: _LEVEL.fullmatch(str(value)) is not None)
WORKED = Kind(
    'a worked answer that ends in "#### NUMBER"',
    lambda value: _is_text(value) and number_of(value.rpartition("####")[2]) is not None,
)

_CHOICE: Mapping[str, Kind] = {"question": TEXT, "choices": OPTIONS, "answer_idx": WHOLE}
COLUMNS: Mapping[str, Mapping[str, Kind]] = {
    "gsm8k": {"question": TEXT, "answer": WORKED},
    "math": {"problem": TEXT, "solution": TEXT, "level": LEVEL, "type": MAYBE_BLANK},
    "math500": {"problem": TEXT, "solution": TEXT, "answer": TEXT, "level": LEVEL},
    "arc_easy": _CHOICE,
    "arc_challenge": _CHOICE,
    "openbookqa": _CHOICE,
    "mmlu": {**_CHOICE, "subject": TEXT},
    "mbpp": {"text": TEXT, "code": TEXT, "task_id": WHOLE, "test_list": TEXTS}
    | {"test_setup_code": MAYBE_BLANK},
    "humaneval": dict.fromkeys(
        ("task_id", "prompt", "entry_point", "canonical_solution", "test"), TEXT
    ),
    "ifeval": {"key": WHOLE, "prompt": TEXT, "instruction_id_list": TEXTS, "kwargs": OBJECTS},
    "json_schema_test_suite": {"description": TEXT, "schema": ANY_SCHEMA, "tests": OBJECTS},
    "jsonschemabench": {"unique_id": TEXT, "json_schema": SCHEMA},
}


def checked(benchmark: str, row: Row, place: str) -> Row:
    """The row, if it is one of that benchmark.

    Args:
        benchmark: One of ``COLUMNS``.
        row: With the columns of ``sources``.
        place: Where it is, for the error.

    Raises:
        ValueError: The place, the column, its value and what was wanted.
    """
    try:
        check_row(benchmark, row)
    except ValueError as error:
        raise ValueError(f"{place}: {error} {MEND}") from error
    return row


def check_row(benchmark: str, row: Row) -> None:
    """Refuse a row that lacks a column, or has something else in it.

    Raises:
        ValueError: The column, its value, and what was wanted.
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {shown(row)}.")
    check_columns(row, COLUMNS[benchmark])
    if "choices" in COLUMNS[benchmark] and not 0 <= row["answer_idx"] < len(row["choices"]):
        raise ValueError(
            f"column 'answer_idx' is {row['answer_idx']}, wanted 0 to {len(row['choices']) - 1}, "
            "the place of the right one among `choices`."
        )
    if benchmark == "ifeval" and len(row["kwargs"]) != len(row["instruction_id_list"]):
        raise ValueError(
            f"column 'kwargs' has {len(row['kwargs'])} entries, wanted one for each of the "
            f"{len(row['instruction_id_list'])} in `instruction_id_list`."
        )


def check_columns(row: Row, columns: Mapping[str, Kind]) -> None:
    """Refuse a row where one of ``columns`` is missing or holds something else.

    Raises:
        ValueError: As for ``check_row``.
    """
    for name, kind in columns.items():
        if name not in row:
            raise ValueError(f"there is no column {name!r}, only {sorted(row)}.")
        if not kind.fits(row[name]):
            raise ValueError(f"column {name!r} is {shown(row[name])}, wanted {kind.wanted}.")
