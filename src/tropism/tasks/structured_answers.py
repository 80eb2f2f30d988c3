"""Answers made without a model: right ones for SFT, and lazy ones that must not pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from tropism.tasks.structured_layout import Layout
from tropism.tasks.structured_schema import AWKWARD
from tropism.tasks.structured_vocabulary import INVENTED_STRINGS

_PATTERNS = {pattern: characters for characters, pattern in AWKWARD.values()}


def invented_names(draw: random.Random) -> Iterator[str]:
    """Each first name with each surname of ``INVENTED_STRINGS``, once, in random order."""
    first, last = zip(*(name.split() for name in INVENTED_STRINGS), strict=True)
    names = [f"{one} {other}" for one, other in product(first, last)]
    draw.shuffle(names)
    return iter(names)


def invented(schema: Mapping[str, Any], strings: Iterator[str], draw: random.Random) -> Any:
    """A value that meets ``schema``, made up; the optional keys of an object by chance."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if schema["type"] == "object":
        fields = schema["properties"].items()
        return {
            name: invented(child, strings, draw)
            for name, child in fields
            if name in schema["required"] or draw.random() < 0.5
        }
    if schema["type"] == "array" and schema["items"]["type"] == "object":
        items = [invented(schema["items"], strings, draw) for _ in range(draw.randint(1, 2))]
        return [item for place, item in enumerate(items) if item not in items[:place]]
    if schema["type"] == "array":
        return list(islice(strings, draw.randint(1, 3)))
    if schema["type"] == "string":
        return _awkward(next(strings), schema)
    if schema["type"] == "boolean":
        return draw.random() < 0.5
    value = draw.randint(schema.get("minimum", 2), schema.get("maximum", 60))
    return value if schema["type"] == "integer" else value + draw.randint(1, 9) / 10


def _awkward(name: str, schema: Mapping[str, Any]) -> str:
    """``name`` with the characters that the schema's patterns ask for, between its words."""
    characters = "".join(_PATTERNS[part["pattern"]] for part in schema.get("allOf", ()))
    return name.replace(" ", characters) if characters else name


def invented_content(schema: Mapping[str, Any], layout: Layout, draw: random.Random) -> Any:
    """One object, or as many as ``layout`` asks for."""
    strings = invented_names(draw)
    if layout.count is None:
        return invented(schema, strings, draw)
    return [invented(schema, strings, draw) for _ in range(draw.randint(*layout.count))]


def filled(schema: Mapping[str, Any], key: str = "") -> Any:
    """The laziest value that meets ``schema``: each string is the name of its own field."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: filled(child, name) for name, child in schema["properties"].items()}
    if schema["type"] == "array":
        return [filled(schema["items"], key)]
    if schema["type"] == "string":
        return key + "".join(_PATTERNS[part["pattern"]] + key for part in schema.get("allOf", ()))
    lowest = schema.get("minimum", 1)
    return {"integer": lowest, "number": lowest, "boolean": True}[schema["type"]]


def filled_content(schema: Mapping[str, Any], layout: Layout) -> Any:
    """``filled``, as many times as ``layout`` asks for."""
    return filled(schema) if layout.count is None else [filled(schema)] * layout.count[0]
