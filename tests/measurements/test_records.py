"""Record tables: the columns are a contract, and rows survive what a run may go through."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tropism.measurements.records import SCHEMA_VERSION, TABLES, RecordTable, read

TABLE = "rewards"


def row(**values: Any) -> dict[str, Any]:
    return {
        "component": "keys",
        "weight": 1.0,
        "mean": 0.5,
        "group_std": 0.25,
        "gradient_share": None,
        **values,
    }


def filled(folder: Path, num_rollouts: int) -> RecordTable:
    table = RecordTable(folder, TABLE)
    for rollout in range(num_rollouts):
        rows = [row(component="keys", mean=rollout / 8), row(component="types")]
        table.append(rows, rollout=rollout, step=2 * rollout)
    return table


def test_rows_are_read_back_as_written(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    frame = read(tmp_path, TABLE)
    assert list(frame.columns) == ["schema", "rollout", "step", *TABLES[TABLE]]
    assert frame["rollout"].tolist() == [0, 0, 1, 1]
    assert frame["step"].tolist() == [0, 0, 2, 2]
    assert frame["component"].tolist() == ["keys", "types"] * 2
    assert frame["mean"].tolist() == [0.0, 0.5, 0.125, 0.5]
    assert set(frame["schema"]) == {SCHEMA_VERSION}


def test_a_file_is_one_json_object_a_line(tmp_path: Path) -> None:
    table = filled(tmp_path, 1)
    assert table.path == tmp_path / "records" / "rewards.jsonl"
    lines = table.path.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {"schema": 1, "rollout": 0, "step": 0, **row(mean=0.0)}


def test_text_may_hold_anything(tmp_path: Path) -> None:
    text = 'Zürich\n"quoted"\t\u2028 line separator, \x85, {"json": 1}'
    table = RecordTable(tmp_path, "completions")
    values = dict.fromkeys(TABLES["completions"]) | {"text": text, "components": {"keys": None}}
    table.append([values, values], rollout=0, step=1)
    frame = read(tmp_path, "completions")
    assert frame["text"].tolist() == [text, text]
    assert frame["components"].tolist() == [{"keys": None}] * 2
    table.truncate(1)
    assert read(tmp_path, "completions")["text"].tolist() == [text, text]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: float) -> None:
    RecordTable(tmp_path, TABLE).append([row(mean=value)], rollout=0, step=0)
    text = (tmp_path / "records" / "rewards.jsonl").read_text()
    assert json.loads(text)["mean"] is None
    nested = dict.fromkeys(TABLES["completions"]) | {"components": {"keys": [value, 1.0]}}
    RecordTable(tmp_path, "completions").append([nested], rollout=0, step=0)
    assert read(tmp_path, "completions")["components"].tolist() == [{"keys": [None, 1.0]}]


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"record table 'reward' is unknown.*'rewards'"):
        RecordTable(tmp_path, "reward")


def test_missing_and_unknown_columns_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    table = RecordTable(tmp_path, TABLE)
    wrong = row(weihgt=1.0)
    del wrong["weight"]
    with pytest.raises(ValueError, match=r"missing columns \['weight'\], unknown .*\['weihgt'\]"):
        table.append([row(), wrong], rollout=0, step=0)
    assert not table.path.exists()


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    table = RecordTable(tmp_path, TABLE)
    table.append([], rollout=0, step=0)
    assert not table.path.exists()
    frame = read(tmp_path, TABLE)
    assert len(frame) == 0
    assert list(frame.columns) == ["schema", "rollout", "step", *TABLES[TABLE]]


def test_truncate_keeps_the_rows_before_the_rollout(tmp_path: Path) -> None:
    table = filled(tmp_path, 4)
    whole = table.path.read_text()
    table.truncate(2)
    assert read(tmp_path, TABLE)["rollout"].tolist() == [0, 0, 1, 1]
    for rollout in (2, 3):  # what the resumed run writes again
        rows = [row(component="keys", mean=rollout / 8), row(component="types")]
        table.append(rows, rollout=rollout, step=2 * rollout)
    assert table.path.read_text() == whole


def test_truncate_drops_a_torn_last_line(tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    with table.path.open("a") as file:
        file.write('{"schema": 1, "rollout": 1, "st')
    table.truncate(2)
    assert read(tmp_path, TABLE)["rollout"].tolist() == [0, 0, 1, 1]


def test_truncate_of_nothing(tmp_path: Path) -> None:
    RecordTable(tmp_path, TABLE).truncate(3)
    assert not (tmp_path / "records").exists()
    table = filled(tmp_path, 1)
    table.truncate(0)
    assert len(read(tmp_path, TABLE)) == 0


def test_rows_are_replaced_all_at_once_or_not_at_all(tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    with pytest.raises(ValueError, match=r"missing columns \['mean'\]"):
        table.replace([(7, 9, {k: v for k, v in row().items() if k != "mean"})])
    assert read(tmp_path, TABLE)["rollout"].tolist() == [0, 0, 1, 1]
    table.replace([(7, 9, row()), (8, 9, row())])
    assert read(tmp_path, TABLE)["rollout"].tolist() == [7, 8]


@pytest.mark.parametrize("damage", [b"{'schema'", b"", b"\x00\x00", b'{"schema": "\xff"}', b"[1]"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    table = filled(tmp_path, 2)
    lines = table.path.read_bytes().splitlines()
    table.path.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    for use in (lambda: read(tmp_path, TABLE), lambda: table.truncate(1)):
        with pytest.raises(ValueError, match=r"\.jsonl, line 2: .* Delete that line"):
            use()


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    table = filled(tmp_path, 1)
    with table.path.open("a") as file:
        file.write(json.dumps({"schema": 99, "rollout": 1, "step": 1, **row()}) + "\n")
    with pytest.raises(ValueError, match=r"schema \[99\]"):
        read(tmp_path, TABLE)
