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
import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.tasks.sources_hub import HUB, read_hub

Row = dict[str, Any]
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
            held_out = {row["problem"] for row in _jsonl(folder / "math500.jsonl")}
            columns = ("problem", "solution", "level", "type")
            return [
                {column: row[column] for column in columns}
                for row in _jsonl(folder / "test.jsonl")
                if row["problem"] not in held_out
            ]
        case "math500":
            return _jsonl(folder / "math500.jsonl")
        case "mmlu":
            return _mmlu(folder / part, part)
        case "mbpp":
            return _jsonl(folder / "mbpp.jsonl")
        case "humaneval":
            return _jsonl(folder / "HumanEval.jsonl.gz")
        case "ifeval":
            return _jsonl(folder / "input_data.jsonl")
        case "json_schema_test_suite":
            return [
                {
                    "file": path.name,
                    **{key: group[key] for key in ("description", "schema", "tests")},
                }
                for path in sorted(_existing(folder / part).glob("*.json"))
                for group in json.loads(path.read_text(encoding="utf-8"))
            ]
        case "gsm8k" | "jsonschemabench":
            return _jsonl(folder / f"{part}.jsonl")
        case _:
            return _jsonl(folder / f"{benchmark}_{part}.jsonl")


def _jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    opened = gzip.open if _existing(path).suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def _mmlu(folder: Path, part: str) -> list[Row]:
    rows = []
    for path in sorted(_existing(folder).glob("*.csv")):
        subject = path.stem.removesuffix(f"_{part}")
        with path.open(encoding="utf-8", newline="") as file:
            for number, cells in enumerate(csv.reader(file)):
                if len(cells) != 6 or cells[5] not in "ABCD":
                    raise ValueError(
                        f"{path}, row {number + 1}: wanted question, A, B, C, D, answer."
                    )
                rows.append(
                    {
                        "id": f"{path.stem}-{number}",
                        "question": cells[0],
                        "choices": cells[1:5],
                        "answer_idx": "ABCD".index(cells[5]),
                        "subject": subject,
                    }
                )
    return rows


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
