"""Whether a value that meets a schema says anything: what keeps ``{}`` from being an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tropism.tasks.structured_echo import is_blank_or_echo


def says_something(value: Any, schema: Mapping[str, Any], prompt: str | None) -> bool:
    """Whether a valid ``value`` has content that is the model's own.

    It has at least one scalar, and one of the properties that the schema names; no string is blank,
    unless the schema itself spells it out (``enum``, ``const``), and no array repeats one text or
    object; and with ``prompt``, where there are strings that the schema does not spell out, not all
    of them are copied from it.

    Args:
        value: An answer.
        schema: What it meets.
        prompt: What the model read, if it was to make the value up; None if it was to find it
            there.
    """
    leaves = list(_leaves(value))
    spelt_out = set(_constants(schema))
    free = [leaf for leaf in leaves if isinstance(leaf, str) and leaf not in spelt_out]
    if not leaves or any(not string.strip() for string in free):
        return False
    if any(_repeats_one(array) for array in _arrays(value)):
        return False
    named = schema.get("properties", {}).keys()
    given = value.keys() if isinstance(value, dict) else set()
    if named and schema.get("type", "object") == "object" and not named & given:
        return False
    if prompt is None or not free:
        return True
    # A version such as "1-0-0" has no words: is it somewhere in the prompt?
    return any(text not in prompt and not is_blank_or_echo(text, prompt) for text in free)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _arrays(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _arrays(item)


def _repeats_one(array: list[Any]) -> bool:
    """Whether an array has nothing but one text or object, twice or more; numbers may be equal."""
    says_much = all(isinstance(item, str | dict) for item in array)
    return says_much and len(array) > 1 and len({json.dumps(i, sort_keys=True) for i in array}) == 1


def _constants(schema: Any) -> Iterator[str]:
    """Strings that a schema spells out as values, wherever they stand."""
    if isinstance(schema, dict):
        for keyword, part in schema.items():
            if keyword in ("enum", "const"):
                yield from (leaf for leaf in _leaves(part) if isinstance(leaf, str))
            yield from _constants(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _constants(part)
