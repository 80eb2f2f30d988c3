"""Rows out of JSONL files, one JSON object a line; faults are named with file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]
OTHER_KINDS = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx")
MEND = "Mend the row, or take it out."
MAX_SHOWN = 80
"""Characters of a value in an error."""


def jsonl_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Where each row is ("FILE, line 3"), and the row; blank lines are skipped.

    Args:
        path: A JSONL file in UTF-8, as it is or gzipped (``.gz``).

    Raises:
        ValueError: The file has no rows, is of another kind, or a line is no JSON object.
    """
    if path.suffix.lower() in OTHER_KINDS:
        raise ValueError(
            f"{path}: only JSONL is read. Convert it: pandas.read_{_reader(path)}({path.name!r})"
            f".to_json({path.stem + '.jsonl'!r}, orient='records', lines=True)."
        )
    has_rows = False
    with _opened(path) as file:
        for place, line in _lines(path, file):
            has_rows = True
            yield place, _object(place, line)
    if not has_rows:
        raise ValueError(f"{path}: the file has no rows.")


def shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _reader(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    return {"tsv": "table", "arrow": "feather", "xlsx": "excel"}.get(kind, kind)


def _opened(path: Path) -> IO[bytes]:
    # gzip's own class is no IO[bytes] to mypy, but reads like one.
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Where each line is, and the line, but for blank ones; decoded one by one, to name them."""
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield f"{path}, line {number}", text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: {error.reason} at byte {error.start}: the file is no JSONL "
            "in UTF-8. Save it as that."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}, behind line {number}: {error}. Get the file again: this one is damaged."
        ) from error


def _object(place: str, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: {error}, in {shown(line.strip())}. Wanted one JSON object a line. {MEND}"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row must be a JSON object, not {shown(row)}.")
    return row
