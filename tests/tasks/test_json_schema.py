"""The JSON Schema verifier: strict types, nothing fetched, patterns that stop; closed schemas."""

import time
from typing import Any

import pytest

from tropism.tasks.json_schema import SchemaVerifier, closed


@pytest.mark.parametrize(
    ("schema", "value", "strict", "standard"),
    [
        ({"type": "integer"}, 2, True, True),
        ({"type": "integer"}, 2.0, False, True),
        ({"type": "integer"}, True, False, False),
        ({"type": "number"}, True, False, False),
        ({"type": "number"}, 2, True, True),
        ({"type": ["integer", "null"]}, 2.0, False, True),
        ({"type": ["integer", "null"]}, None, True, True),
        ({"type": "boolean"}, 1, False, False),
        ({"type": "boolean"}, False, True, True),
        ({"type": "string"}, "x", True, True),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2.0], False, True),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
         {"a": 3.0}, False, True),
        ({"type": "number"}, float("nan"), False, False),
        ({"type": "number"}, float("inf"), False, False),
        ({"type": "object"}, {1: 2}, False, False),
        ({}, {"a": {1, 2}}, False, False),
        ({}, b"x", False, False),
        ({"type": "integer"}, 10**400, True, True),
        (True, 3, True, True),
        (False, 3, False, False),
    ],
)  # fmt: skip
def test_types(schema: Any, value: Any, strict: bool, standard: bool) -> None:
    assert SchemaVerifier(schema).is_valid(value) is strict
    assert SchemaVerifier(schema, has_strict_integers=False).is_valid(value) is standard


def test_errors_say_what_is_wrong() -> None:
    verifier = SchemaVerifier({"properties": {"a": {"type": "integer"}}, "required": ["b"]})
    assert verifier.errors({"a": 1, "b": 2}) == []
    errors = verifier.errors({"a": 1.0})
    assert any("1.0 is not of type integer" in error for error in errors)
    assert any('"b" is a required property' in error for error in errors)
    assert verifier.errors({"a": {1}}) == ["not a JSON value"]
    assert len(verifier.errors({"a": 1.0}, num=1)) == 1


def test_formats_are_remarks_unless_asked_for() -> None:
    schema = {"type": "string", "format": "date"}
    assert SchemaVerifier(schema).is_valid("tomorrow")
    assert not SchemaVerifier(schema, should_check_formats=True).is_valid("tomorrow")
    assert SchemaVerifier(schema, should_check_formats=True).is_valid("2026-01-31")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "whole"}, "whole"),
        ({"type": 3}, "offline"),
        ({"pattern": "(("}, "regex"),
        ({"$ref": "http://localhost:1/x.json"}, "Retrieval is disabled"),
        ({"$ref": "file:///etc/passwd"}, "Retrieval is disabled"),
        ({"$ref": "#/$defs/missing"}, "offline"),
        ({"$schema": "http://localhost:1/meta"}, "offline"),
    ],
)
def test_schemas_that_cannot_be_checked(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchemaVerifier(schema)


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", "^(?=(a+)+$)", "(.*a){12}$"])
def test_a_pattern_cannot_hang_the_run(pattern: str) -> None:
    start = time.process_time()
    SchemaVerifier({"pattern": pattern}).is_valid("a" * 40 + "!")
    assert time.process_time() - start < 1.0


def test_deep_values_do_not_end_the_run() -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    assert SchemaVerifier({}).is_valid(value)


def test_closed_schemas_know_their_keys() -> None:
    inner = {"properties": {"b": {"type": "integer"}}}
    schema = {"properties": {"a": inner, "c": {"items": inner}}}
    verifier = SchemaVerifier(closed(schema))
    assert verifier.is_valid({"a": {"b": 1}, "c": [{"b": 1}]})
    for value in ({"x": 1}, {"a": {"x": 1}}, {"c": [{"b": 1, "x": 2}]}):
        assert SchemaVerifier(schema).is_valid(value)
        assert not verifier.is_valid(value)
    assert "additionalProperties" not in inner  # a copy


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "allOf": [{"properties": {"x": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/d", "$defs": {"d": {"properties": {"x": {}}}}},
        {"type": "object"},
        True,
    ],
)
def test_schemas_that_speak_of_other_keys_stay_as_they_are(schema: Any) -> None:
    assert closed(schema) == schema
