"""Public suites through the verifier; every difference is counted and has its reason here.

``pytest -s tests/tasks/test_json_schema_suite.py`` prints the counts.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tropism.tasks.json_schema import SchemaVerifier
from tropism.tasks.schema_rows import SchemaRows
from tropism.tasks.sources import read_rows

DATA = Path(
    os.environ.get("TROPISM_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)
pytestmark = pytest.mark.skipif(
    not (DATA / "json_schema_test_suite").is_dir(), reason=f"no benchmark data in {DATA}"
)

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
NUM_TESTS = {"draft2020-12": 1299, "draft7": 927}
# Schemas that point to http://localhost:1234, where the suite's own server would be: nothing is
# fetched, so they are refused when they are compiled.
ELSEWHERE = {
    "draft2020-12": {"dynamicRef.json": 13, "refRemote.json": 31, "vocabulary.json": 5},
    "draft7": {"refRemote.json": 23},
}
# The suite takes 1.0 for an integer; strict integers do not.
STRICTER = {("type.json", "a float with zero fractional part is an integer")}


def is_refused(schema: Any, reason: str) -> bool:
    """Whether the verifier refuses a schema for this reason; another one fails the test later."""
    try:
        SchemaVerifier(schema)
    except ValueError as error:
        return reason in str(error)
    return False


@pytest.mark.parametrize("has_strict_integers", [False, True])
@pytest.mark.parametrize("draft", DRAFTS)
def test_json_schema_test_suite(draft: str, has_strict_integers: bool) -> None:
    groups, _ = read_rows("json_schema_test_suite", draft, data=str(DATA))
    num_right, num_tests = 0, 0
    refused: Counter[str] = Counter()
    differing = set()
    for group in groups:
        schema = group["schema"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        num_tests += len(group["tests"])
        if is_refused(schema, "localhost:1234"):
            refused[group["file"]] += len(group["tests"])
            continue
        verifier = SchemaVerifier(schema, has_strict_integers=has_strict_integers)
        for case in group["tests"]:
            if verifier.is_valid(case["data"]) == case["valid"]:
                num_right += 1
            else:
                differing.add((group["file"], case["description"]))
    print(
        f"\n{draft}, strict integers {has_strict_integers}: {num_right} of {num_tests} right, "
        f"{refused.total()} refused (elsewhere), {len(differing)} differ"
    )
    assert num_tests == NUM_TESTS[draft]
    assert refused == ELSEWHERE[draft]
    assert differing == (STRICTER if has_strict_integers else set())
    assert num_right == num_tests - refused.total() - len(differing)


# Part -> schemas, schemas that are none (two patterns are no regular expressions), and schemas that
# one of {}, [], "", 0 and null meets: what makes the bare verifier a reward that can be had for {}.
SCHEMA_BENCH = {
    "Github_trivial": (429, 0, 262),
    "Github_easy": (1938, 0, 829),
    "Glaiveai2K": (1707, 0, 30),
    "Snowplow": (371, 0, 183),
    "Github_medium": (1927, 2, 830),
}
# 0 is an answer where a schema asks for a number.
NOTHING = ("{}", "[]", '""', "null", '{"": ""}', "[[]]", '"   "')


@pytest.mark.parametrize("part", SCHEMA_BENCH)
def test_json_schema_bench_compiles_and_is_not_had_for_nothing(part: str) -> None:
    rows, _ = read_rows("jsonschemabench", part, data=str(DATA))
    refused = trivial = 0
    for row in rows:
        if is_refused(row["json_schema"], 'is not a "regex"'):
            refused += 1
            continue
        verifier = SchemaVerifier(row["json_schema"])
        trivial += any(verifier.is_valid(value) for value in ({}, [], "", 0, None))
    print(f"\n{part}: {len(rows) - refused} of {len(rows)} compile, {trivial} are met by nothing")
    assert (len(rows), refused, trivial) == SCHEMA_BENCH[part]
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


def test_json_schema_bench_easy_agrees_with_the_reference_implementation() -> None:
    """The same verdicts as the ``jsonschema`` package on values near what each schema asks for."""
    reference = pytest.importorskip("jsonschema")
    rows, _ = read_rows("jsonschemabench", "Github_easy", data=str(DATA))
    num_verdicts = num_valid = num_skipped = 0
    differing: Counter[str] = Counter()
    for row in rows:
        schema = row["json_schema"]
        cls = reference.validators.validator_for(schema, reference.Draft202012Validator)
        verifier = SchemaVerifier(schema, has_strict_integers=False)
        for value in near(schema):
            try:
                expected = cls(schema).is_valid(value)
            except Exception as error:  # a schema that the reference cannot read
                num_skipped += 1
                differing[f"reference raises {type(error).__name__}"] += 1
                continue
            num_verdicts += 1
            num_valid += expected
            if verifier.is_valid(value) != expected:
                differing[row["unique_id"]] += 1
    print(
        f"\nGithub_easy: {num_verdicts} verdicts ({num_valid} valid) compared with jsonschema, "
        f"{num_skipped} that it could not give; differing: {dict(differing)}"
    )
    assert num_verdicts > 10_000
    assert 2_000 < num_valid < num_verdicts - 2_000
    assert differing == EXPLAINED


# `dependencies` in a schema without `$schema`: draft 2020-12 no longer has it, jsonschema-rs still
# heeds it, as the drafts allow.
EXPLAINED = Counter({"o7501": 1})


def near(schema: dict[str, Any]) -> Iterator[Any]:
    """A value with all keys of the right type, and small changes to it."""
    yield from ({}, [], "x", 2.0, None, {"no such key": 1})
    full = filled(schema)
    yield full
    if isinstance(full, dict):
        for key in list(full)[:4]:
            yield {other: value for other, value in full.items() if other != key}
            yield {**full, key: [full[key]]}
            yield {**full, key: None}


def filled(schema: Any) -> Any:
    """Something of the right type; it need not meet the schema."""
    if not isinstance(schema, dict):
        return 1
    for keyword in ("const", "default"):
        if keyword in schema:
            return schema[keyword]
    if schema.get("enum"):
        return schema["enum"][0]
    for keyword in ("oneOf", "anyOf", "allOf"):
        if schema.get(keyword) and "properties" not in schema:
            return filled(schema[keyword][0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {key: filled(child) for key, child in schema.get("properties", {}).items()}
    if kind == "array":
        items = schema.get("items", {})
        return [filled(items[0] if isinstance(items, list) else items)]
    low = schema.get("minimum", 1)
    return {"integer": low, "number": low, "boolean": True, "null": None}.get(kind, "Ada")
