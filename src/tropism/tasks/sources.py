"""Rows of the public benchmarks, from a folder or from the Hugging Face hub, with the same columns.

    gsm8k                    train, test: question, answer
    math                     train (4,500, MATH's test set without MATH-500): problem, solution,
                             level, type
    math500                  test: problem, solution, answer, subject, level, unique_id
    arc_easy, arc_challenge  train, test: id, question, choices, answer_idx
    openbookqa               train, test: the same
    mmlu                     dev, val, test, of all 57 subjects: the same, and subject
    mbpp                     prompt, test, validation, train, all: text, code, task_id,
                             test_setup_code, test_list, challenge_test_list
    humaneval                test: task_id, prompt, entry_point, canonical_solution, test
    ifeval                   test: key, prompt, instruction_id_list, kwargs
    json_schema_test_suite   draft2020-12, draft7, a row for each group: file, description, schema,
                             tests
    jsonschemabench          Github_trivial, Github_easy, Glaiveai2K, Snowplow, Github_medium:
                             unique_id, json_schema

A folder has one subfolder for each source. Revision and licence are read from the ``NOTICE.txt`` in
it, where that has lines ``source: ... at COMMIT`` and ``licence: ...``.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tropism.tasks.row_checks import checked
from tropism.tasks.row_files import MEND, Row, jsonl_rows, shown
from tropism.tasks.sources_hub import HUB, read_hub

LETTERS = ("A", "B", "C", "D")
SCHEMA_PARTS = ("Github_trivial", "Github_easy", "Glaiveai2K", "Snowplow", "Github_medium")
MBPP_PARTS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
    "all": range(1, 975),
}


@dataclass(frozen=True)
class Source:
    """Where the rows of one benchmark are.

    Args:
        folder: Name of its folder.
        parts: Names of its parts.
        licence: Of the data.
        note: What a reader of its scores must know.
    """

    folder: str
    parts: tuple[str, ...]
    licence: str
    note: str = ""


SOURCES: Mapping[str, Source] = {
    "gsm8k": Source("gsm8k", ("train", "test"), "MIT"),
    "math": Source("math", ("train",), "MIT", "MATH's test set without MATH-500."),
    "math500": Source("math", ("test",), "MIT"),
    "arc_easy": Source("arc", ("train", "test"), "CC BY-SA 4.0"),
    "arc_challenge": Source("arc", ("train", "test"), "CC BY-SA 4.0"),
    "openbookqa": Source("openbookqa", ("train", "test"), "Apache-2.0"),
    "mmlu": Source("mmlu", ("dev", "val", "test"), "MIT"),
    "mbpp": Source("mbpp", tuple(MBPP_PARTS), "CC BY 4.0"),
    "humaneval": Source("humaneval", ("test",), "MIT"),
    "ifeval": Source("ifeval", ("test",), "Apache-2.0"),
    "json_schema_test_suite": Source("json_schema_test_suite", ("draft2020-12", "draft7"), "MIT"),
    "jsonschemabench": Source("jsonschemabench", SCHEMA_PARTS, "MIT"),
}
_PRE_RELEASE_ROWS = {"dev": 285, "val": 1_542, "test": 14_079}
_PRE_RELEASE = (
    "Pre-release CSV (14,079 test rows; the released set has 14,042): scores are not exactly "
    "comparable with published ones."
)


@dataclass(frozen=True)
class DataInfo:
    """What was read, for the records of a run.

    Args:
        benchmark: Its name here.
        part: Of the benchmark.
        place: The folder, or ``hub:`` and the id.
        revision: Commit of the source; None where it is not known.
        licence: Of the data.
        num_rows: In this part.
        sha256: Of the rows, as JSON with sorted keys, one a line: the same data have the same one,
            wherever they came from.
        note: What a reader of the scores must know.
    """

    benchmark: str
    part: str
    place: str
    revision: str | None
    licence: str
    num_rows: int
    sha256: str
    note: str = ""


def read_rows(benchmark: str, part: str, *, data: str | None = None) -> tuple[list[Row], DataInfo]:
    """The rows of one part of a benchmark.

    Args:
        benchmark: One of ``SOURCES``.
        part: One of its parts.
        data: Folder with the benchmarks' folders; null for the environment's ``TROPISM_DATA``, and
            for the hub where that is not set either.

    Raises:
        ValueError: Unknown benchmark or part; the data are missing or malformed.
    """
    if benchmark not in SOURCES:
        raise ValueError(f"benchmark={benchmark!r}: choose from {sorted(SOURCES)}.")
    source = SOURCES[benchmark]
    if part not in source.parts:
        raise ValueError(f"part={part!r}: {benchmark} has {list(source.parts)}.")
    root = data or os.environ.get("TROPISM_DATA")
    if root:
        folder = Path(root) / source.folder
        rows = _read_folder(benchmark, part, folder)
        revision, licence = _notice(folder)
        place = str(folder)
    else:
        rows, revision = read_hub(benchmark, part)
        place, licence = f"hub:{HUB[benchmark]}", None
    if benchmark == "mbpp":
        rows = [row for row in rows if int(row["task_id"]) in MBPP_PARTS[part]]
    if not rows:
        raise ValueError(f"{place}: {benchmark} has no rows of part {part!r}.")
    note = source.note
    if benchmark == "mmlu" and root and len(rows) == _PRE_RELEASE_ROWS[part]:
        note = _PRE_RELEASE
    info = DataInfo(
        benchmark, part, place, revision, licence or source.licence, len(rows), digest(rows), note
    )
    return rows, info


def digest(rows: Iterable[Row]) -> str:
    """SHA-256 of rows, whatever the order of their columns."""
    sha256 = hashlib.sha256()
    for row in rows:
        sha256.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return sha256.hexdigest()


# -- folder ---------------------------------------------------------------------------------------


def _read_folder(benchmark: str, part: str, folder: Path) -> list[Row]:
    match benchmark:
        case "math":
            held_out = {row["problem"] for row in _jsonl(folder / "math500.jsonl", "math500")}
            columns = ("problem", "solution", "level", "type")
            return [
                {column: row[column] for column in columns}
                for row in _jsonl(folder / "test.jsonl", benchmark)
                if row["problem"] not in held_out
            ]
        case "math500":
            return _jsonl(folder / "math500.jsonl", benchmark)
        case "mmlu":
            return _mmlu(folder / part, part)
        case "mbpp":
            return _jsonl(folder / "mbpp.jsonl", benchmark)
        case "humaneval":
            return _jsonl(folder / "HumanEval.jsonl.gz", benchmark)
        case "ifeval":
            return _jsonl(folder / "input_data.jsonl", benchmark)
        case "json_schema_test_suite":
            return _schema_tests(_existing(folder / part))
        case "gsm8k" | "jsonschemabench":
            return _jsonl(folder / f"{part}.jsonl", benchmark)
        case _:
            return _jsonl(folder / f"{benchmark}_{part}.jsonl", benchmark)


def _jsonl(path: Path, benchmark: str) -> list[Row]:
    return [checked(benchmark, row, place) for place, row in jsonl_rows(_existing(path))]


def _schema_tests(folder: Path) -> list[Row]:
    rows = []
    for path in sorted(folder.glob("*.json")):
        try:
            groups = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}. Get the file again: it is damaged.") from error
        for number, group in enumerate(groups, start=1):
            checked("json_schema_test_suite", group, f"{path}, group {number}")
            columns = {key: group[key] for key in ("description", "schema", "tests")}
            rows.append({"file": path.name, **columns})
    return rows


def _mmlu(folder: Path, part: str) -> list[Row]:
    rows = []
    for path in sorted(_existing(folder).glob("*.csv")):
        subject = path.stem.removesuffix(f"_{part}")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            for number, cells in enumerate(_cells(reader, path)):
                place = f"{path}, line {reader.line_num}"
                if len(cells) != 6:
                    raise ValueError(
                        f"{place}: {len(cells)} cells, the first {shown(cells[:1])}; wanted 6: "
                        f"question, A, B, C, D, answer. {MEND}"
                    )
                if cells[5] not in LETTERS:
                    raise ValueError(
                        f"{place}: the 6th cell, the answer, is {shown(cells[5])}; wanted one of "
                        f"{', '.join(LETTERS)}. {MEND}"
                    )
                row = {
                    "id": f"{path.stem}-{number}",
                    "question": cells[0],
                    "choices": cells[1:5],
                    "answer_idx": LETTERS.index(cells[5]),
                    "subject": subject,
                }
                rows.append(checked("mmlu", row, place))
    return rows


def _cells(reader: Iterator[list[str]], path: Path) -> Iterator[list[str]]:
    try:
        yield from reader
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}. Wanted CSV in UTF-8. {MEND}") from error


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(
            f"{path}: there is no such file or folder. Set `data` of the task, or the "
            "environment's TROPISM_DATA, to a folder that has it, or leave both empty to read "
            "from the hub."
        )
    return path


def _notice(folder: Path) -> tuple[str | None, str | None]:
    """Revision and licence, as the folder's ``NOTICE.txt`` gives them."""
    path = folder / "NOTICE.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    commit = re.search(r"^source: .* at ([0-9a-f]{7,40})\s*$", text, re.MULTILINE)
    licence = re.search(r"^licence: (.+?)\s*$", text, re.MULTILINE)
    return commit and commit[1], licence and licence[1]
