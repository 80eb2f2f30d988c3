"""The schema that an answer must meet: a tree of typed fields, and strict checks against it.

``jsonschema-rs`` decides enums, bounds and lengths. It takes 2.0 for an integer, as JSON Schema
says; here it is a number, as a Python or SQL reader of the answer would find, so kinds are checked
first and more strictly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jsonschema_rs

ARRAY_LIMITS: Mapping[str, Any] = {"minItems": 1, "maxItems": 5, "uniqueItems": True}

AWKWARD: Mapping[str, tuple[str, str]] = {
    "a double quote": ('"', '"'),
    "a line break": ("\n", r"\n"),
    "a backslash": ("\\", r"\\"),
    "an ampersand": ("&", "&"),
    "a less-than sign": ("<", "<"),
    "a number sign": (" #", "#"),
    "a colon": (": ", ":"),
}
"""What some format must quote or escape: in words -> (the characters, a pattern that finds it)."""

_LIMITS = {"string": ("minLength", "maxLength")} | dict.fromkeys(
    ("integer", "number", "boolean"), ("minimum", "maximum")
)

Kind = Literal["string", "integer", "number", "boolean", "enum", "array", "object"]


@dataclass(frozen=True)
class Field:
    """One field of an object.

    Args:
        name: Its key.
        kind: Its type; ``enum`` is a string out of ``options``.
        minimum: Smallest integer allowed, or length of a string; None for any.
        maximum: Largest integer allowed, or length of a string; None for any.
        options: The values of an enum.
        items: What an array holds.
        fields: What an object holds; no others are allowed.
        optional: The key may be absent.
        contains: Of a string: names of ``AWKWARD`` that it must have in it.
    """

    name: str
    kind: Kind
    minimum: int | None = None
    maximum: int | None = None
    options: tuple[str, ...] = ()
    items: Field | None = None
    fields: tuple[Field, ...] = ()
    optional: bool = False
    contains: tuple[str, ...] = ()


def json_schema(field: Field) -> dict[str, Any]:
    """``field`` as JSON Schema.

    No other keys are allowed; arrays hold 1 to 5 different items.
    """
    if field.kind == "enum":
        return {"type": "string", "enum": list(field.options)}
    if field.kind == "array":
        assert field.items is not None
        return {"type": "array", "items": json_schema(field.items), **ARRAY_LIMITS}
    if field.kind == "object":
        return {
            "type": "object",
            "properties": {child.name: json_schema(child) for child in field.fields},
            "required": [child.name for child in field.fields if not child.optional],
            "additionalProperties": False,
        }
    schema: dict[str, Any] = {"type": field.kind}
    lowest, highest = _LIMITS[field.kind]
    if field.minimum is not None:
        schema[lowest] = field.minimum
    if field.maximum is not None:
        schema[highest] = field.maximum
    if field.contains:
        schema["allOf"] = [{"pattern": AWKWARD[name][1]} for name in field.contains]
    return schema


def has_kind(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether ``value`` has the type that ``schema`` asks for, all the way down.

    A bool is never a number, 2.0 is not an integer, and infinity (``1e999``) is no number at all.
    Enums, bounds and lengths are not looked at.
    """
    kind = schema["type"]
    if kind == "string":
        return isinstance(value, str)
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (isinstance(value, int) or math.isfinite(value))
    if kind == "array":
        return isinstance(value, list) and all(has_kind(item, schema["items"]) for item in value)
    return isinstance(value, dict) and all(
        has_kind(value[key], child) if key in value else key not in schema["required"]
        for key, child in schema["properties"].items()
    )


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether ``value`` meets ``schema`` in full, with the strictness of ``has_kind``."""
    is_typed = has_kind(value, schema) and is_json(value)
    return is_typed and _validator(json.dumps(schema)).is_valid(value)


def is_json(value: Any) -> bool:
    """Whether ``value`` is made of what JSON can say; YAML has dates, sets and bytes besides."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_json(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


@lru_cache(maxsize=4096)
def _validator(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads(schema))


def schema_paths(schema: Mapping[str, Any], *, only_required: bool = False) -> set[tuple[str, ...]]:
    """Key paths of the fields, those of nested objects included, those inside arrays not."""
    paths: set[tuple[str, ...]] = set()
    for key, child in schema["properties"].items():
        if only_required and key not in schema["required"]:
            continue
        paths.add((key,))
        if child["type"] == "object":
            inner = schema_paths(child, only_required=only_required)
            paths |= {(key, *path) for path in inner}
    return paths


def answer_paths(value: Mapping[str, Any], schema: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Key paths of an answer; below a key only where ``schema`` has an object there."""
    paths: set[tuple[str, ...]] = set()
    for key, item in value.items():
        paths.add((key,))
        child = schema["properties"].get(key, {})
        if child.get("type") == "object" and isinstance(item, dict):
            paths |= {(key, *path) for path in answer_paths(item, child)}
    return paths


def free_strings(value: Any, schema: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """The strings that the model had to make up (no enums), of a valid answer.

    Yields:
        One sequence per field: a single string, or all items of an array.
    """
    for key, child in schema["properties"].items():
        if key not in value:
            continue
        if child["type"] == "string" and "enum" not in child:
            yield [value[key]]
        elif child["type"] == "array" and child["items"]["type"] == "object":
            for item in value[key]:
                yield from free_strings(item, child["items"])
        elif child["type"] == "array":
            yield value[key]
        elif child["type"] == "object":
            yield from free_strings(value[key], child)
