"""How far does the verifier of structured output agree with public suites, and if not, why?

    python benchmarks/json_schemas.py [--data FOLDER]

Writes ``results/json_schemas.csv``, and ends with status 1 where a difference has no reason here.
The data are the folders ``json_schema_test_suite`` and ``jsonschemabench`` (``--data`` or
``TROPISM_DATA``; the second one may come from the hub).

1. The JSON Schema Test Suite (drafts 2020-12 and 7): the verdicts that it expects, with integers as
   the standard has them (1.0 is one) and strict ones (it is not).
2. JSONSchemaBench: which schemas compile, and which are met by {}, [], "", 0 or null.
3. Its part "easy", where no answers come along: on values near what each schema asks for, the
   verdicts of the package ``jsonschema``, against the verifier and against the reward of
   ``SchemaRows``, which also forbids keys that a schema does not name.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from tropism.tasks.json_schema import SchemaVerifier, closed
from tropism.tasks.schema_rows import SchemaRows
from tropism.tasks.sources import SCHEMA_PARTS, read_rows

RESULTS = Path(__file__).parent / "results" / "json_schemas.csv"
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
AGREE = "agree"
ELSEWHERE = "refused: the schema is at http://localhost:1234, and nothing is fetched"
NO_REGEX = "refused: a pattern is no regular expression"
WHOLE_FLOAT = "differ: 1.0 is no integer here"
UNNAMED_KEY = "differ: a key that the schema does not name"
NULL = "differ: null alone is no answer"
DEPENDENCIES = (
    "differ: `dependencies` without `$schema`, which draft 2020-12 no longer has and jsonschema-rs "
    "still heeds, as drafts allow"
)
DEPENDING = {"o7501"}
UNKNOWN = "differ: NO REASON KNOWN"


class Line(NamedTuple):
    """So many cases of one kind."""

    part: str
    compared: str
    cases: int
    outcome: str


def lines_of(part: str, compared: str, outcomes: Counter[str]) -> list[Line]:
    """All cases first, then each outcome."""
    total = Line(part, compared, outcomes.total(), "all")
    return [total, *(Line(part, compared, n, outcome) for outcome, n in sorted(outcomes.items()))]


# -- 1. test suite --------------------------------------------------------------------------------


def expected_verdicts(draft: str, *, has_strict_integers: bool, data: str | None) -> list[Line]:
    """One draft of the JSON Schema Test Suite, test by test."""
    outcomes: Counter[str] = Counter()
    groups, _ = read_rows("json_schema_test_suite", draft, data=data)
    for group in groups:
        schema, tests = group["schema"], group["tests"]
        if isinstance(schema, dict):
            schema = {"$schema": DRAFTS[draft], **schema}
        verifier = compiled(schema, has_strict_integers=has_strict_integers)
        if isinstance(verifier, str):
            outcomes[verifier] += len(tests)
            continue
        loose = SchemaVerifier(schema, has_strict_integers=False)
        for test in tests:
            if verifier.is_valid(test["data"]) == test["valid"]:
                outcomes[AGREE] += 1
            elif loose.is_valid(test["data"]) == test["valid"]:
                outcomes[WHOLE_FLOAT] += 1
            else:
                outcomes[f"{UNKNOWN} ({group['file']}: {test['description']})"] += 1
    return lines_of(draft, f"expected verdicts, {integers(has_strict_integers)}", outcomes)


def compiled(schema: Any, **settings: bool) -> SchemaVerifier | str:
    """The verifier of a schema, or the reason why there is none."""
    try:
        return SchemaVerifier(schema, **settings)
    except ValueError as error:
        for part, reason in (("localhost:1234", ELSEWHERE), ('is not a "regex"', NO_REGEX)):
            if part in str(error):
                return reason
        return f"{UNKNOWN} ({error})"


def integers(are_strict: bool) -> str:
    return "strict integers" if are_strict else "integers of the standard"


# -- 2. schemas that compile ----------------------------------------------------------------------


def schema_bench(part: str, *, data: str | None) -> list[Line]:
    """One part of JSONSchemaBench, schema by schema."""
    outcomes: Counter[str] = Counter()
    for row in read_rows("jsonschemabench", part, data=data)[0]:
        verifier = compiled(row["json_schema"])
        if isinstance(verifier, str):
            outcomes[verifier] += 1
        elif any(verifier.is_valid(value) for value in ({}, [], "", 0, None)):
            outcomes['compile, and are met by {}, [], "", 0 or null'] += 1
        else:
            outcomes["compile"] += 1
    return lines_of(part, "schemas", outcomes)


# -- 3. verdicts on values near to valid ones -----------------------------------------------------


def near_values(*, data: str | None) -> list[Line]:
    """The part "easy" against ``jsonschema``: the bare verifier, then the reward."""
    verifying: Counter[str] = Counter()
    rewarding: Counter[str] = Counter()
    reward = Reward(data)
    for row in read_rows("jsonschemabench", "Github_easy", data=data)[0]:
        schema, name = row["json_schema"], row["unique_id"]
        reference = validator_for(schema, Draft202012Validator)(schema)
        verifier = SchemaVerifier(schema, has_strict_integers=False)
        for value in near(schema):
            try:
                expected = reference.is_valid(value)
            except (SchemaError, TypeError, AttributeError) as error:
                verifying[f"jsonschema raises {type(error).__name__}"] += 1
                continue
            verdict = "valid" if expected else "invalid"
            is_same = verifier.is_valid(value) == expected
            reason = DEPENDENCIES if name in DEPENDING else f"{UNKNOWN} ({name})"
            verifying[f"{AGREE}: {verdict}" if is_same else reason] += 1
            if reward.is_valid(schema, value) == expected:
                rewarding[f"{AGREE}: {verdict}"] += 1
            else:
                rewarding[_why(schema, value, expected) or reason] += 1
    compared = "jsonschema's verdicts on values near to valid ones"
    return [
        *lines_of("Github_easy", f"{compared}, verifier", verifying),
        *lines_of("Github_easy", f"{compared}, reward `valid` of SchemaRows", rewarding),
    ]


class Reward:
    """What ``SchemaRows`` says of answers, for any schema and without a file."""

    def __init__(self, data: str | None) -> None:
        self._task = SchemaRows("Github_easy", data=data, validation_fraction=0, test_fraction=0)

    def is_valid(self, schema: Any, value: Any) -> bool:
        prompt = self._task._prompt({"json_schema": schema})
        return self._task.score(prompt, json.dumps(value))["valid"] == 1.0


def _why(schema: Any, value: Any, expected: bool) -> str | None:
    """Which of the reward's own conditions makes the difference; None for none of them."""
    if value is None:
        return NULL if expected else None
    if SchemaVerifier(schema).is_valid(value) == expected:
        return UNNAMED_KEY
    if SchemaVerifier(closed(schema), has_strict_integers=False).is_valid(value) == expected:
        return WHOLE_FLOAT
    is_either = SchemaVerifier(schema, has_strict_integers=False).is_valid(value) == expected
    return f"{UNNAMED_KEY}, and {WHOLE_FLOAT.removeprefix('differ: ')}" if is_either else None


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
            if type(full[key]) is int:
                yield {**full, key: float(full[key])}


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


def written(lines: Iterable[Line]) -> str:
    """The lines as CSV."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerows([Line._fields, *lines])
    return text.getvalue()


def main() -> None:
    """Measure, write, and say whether all is explained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", help="folder of the benchmarks' data; default: TROPISM_DATA")
    data = parser.parse_args().data
    lines = [
        line
        for draft in DRAFTS
        for is_strict in (False, True)
        for line in expected_verdicts(draft, has_strict_integers=is_strict, data=data)
    ]
    lines += [line for part in SCHEMA_PARTS for line in schema_bench(part, data=data)]
    lines += near_values(data=data)
    RESULTS.write_text(written(lines), encoding="utf-8")
    for line in lines:
        print(f"{line.part:<15} {line.cases:>6}  {line.outcome}  [{line.compared}]")
    if any(UNKNOWN in line.outcome for line in lines):
        sys.exit("a difference has no reason")


if __name__ == "__main__":
    main()
