"""Public suites through the verifier: the committed counts are those of this code."""

from __future__ import annotations

import csv
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tropism.tasks.schema_rows import SchemaRows
from tropism.tasks.sources import SCHEMA_PARTS

pytest.importorskip("jsonschema", reason="needs the reference implementation")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DATA = Path(
    os.environ.get("TROPISM_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)
pytestmark = pytest.mark.skipif(
    not (DATA / "json_schema_test_suite").is_dir(), reason=f"no benchmark data in {DATA}"
)
# 0 is an answer where a schema asks for a number.
NOTHING = ("{}", "[]", '""', "null", '{"": ""}', "[[]]", '"   "')


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``benchmarks/json_schemas.py``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("json_schemas")


def committed(part: str) -> dict[str, list[tuple[str, int]]]:
    """What was compared -> outcomes and their counts."""
    found: dict[str, list[tuple[str, int]]] = {}
    with (BENCHMARKS / "results" / "json_schemas.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["part"] == part:
                outcome = (row["outcome"], int(row["cases"]))
                found.setdefault(row["compared"], []).append(outcome)
    return found


def measured(lines: list[Any]) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for line in lines:
        found.setdefault(line.compared, []).append((line.outcome, line.cases))
    return found


@pytest.mark.parametrize(
    ("draft", "num_tests", "num_elsewhere"), [("draft2020-12", 1299, 49), ("draft7", 927, 23)]
)
def test_json_schema_test_suite(
    script: Any, draft: str, num_tests: int, num_elsewhere: int
) -> None:
    found: dict[str, list[tuple[str, int]]] = {}
    for is_strict in (False, True):
        lines = script.expected_verdicts(draft, has_strict_integers=is_strict, data=str(DATA))
        found |= measured(lines)
        assert {line.outcome: line.cases for line in lines} == {
            "all": num_tests,
            "agree": num_tests - num_elsewhere - is_strict,
            script.ELSEWHERE: num_elsewhere,
            **({script.WHOLE_FLOAT: 1} if is_strict else {}),
        }
    assert found == committed(draft)


@pytest.mark.parametrize("part", SCHEMA_PARTS)
def test_json_schema_bench_compiles_and_is_not_had_for_nothing(script: Any, part: str) -> None:
    lines = script.schema_bench(part, data=str(DATA))
    assert measured(lines).items() <= committed(part).items()
    refused = {line.outcome: line.cases for line in lines if "refused" in line.outcome}
    assert refused == ({script.NO_REGEX: 2} if part == "Github_medium" else {})
    task = SchemaRows(
        part,
        data=str(DATA),
        validation_fraction=0,
        test_fraction=0.05,
        should_skip_unusable=True,
    )
    for prompt in task.prompts("test", 10, seed=0):
        for completion in (*NOTHING, json.dumps(prompt.columns["schema"])):
            assert task.score(prompt, completion)["pass"] == 0.0


def test_json_schema_bench_easy_agrees_with_the_reference_implementation(script: Any) -> None:
    """The same verdicts as the ``jsonschema`` package on values near what each schema asks for."""
    lines = script.near_values(data=str(DATA))
    assert measured(lines).items() <= committed("Github_easy").items()
    bare, reward = measured(lines).values()
    counts = dict(bare)
    assert counts["agree: valid"] > 5_000
    assert counts["agree: invalid"] > 20_000
    assert counts["all"] - counts["agree: valid"] - counts["agree: invalid"] == 1
    assert {outcome for outcome, _ in bare if "differ" in outcome} == {script.DEPENDENCIES}
    assert {outcome for outcome, _ in reward if "differ" in outcome} == {
        script.DEPENDENCIES,
        script.UNNAMED_KEY,
        script.WHOLE_FLOAT,
        script.NULL,
    }


def test_a_difference_without_a_reason_is_told(script: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert script._why(schema, {"a": 1, "b": 1}, True) == script.UNNAMED_KEY
    assert script._why(schema, {"a": 1.0}, True) == script.WHOLE_FLOAT
    assert script._why(schema, {"a": 1.0, "b": 1}, True) == (
        f"{script.UNNAMED_KEY}, and 1.0 is no integer here"
    )
    assert script._why(True, None, True) == script.NULL
    assert script._why(schema, {"a": "x"}, True) is None
    assert script.compiled({"type": "whole"}).startswith(script.UNKNOWN)
