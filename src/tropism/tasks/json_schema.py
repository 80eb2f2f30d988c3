"""Verifier of values against any JSON Schema: ``jsonschema-rs``, offline, with stricter types.

JSON Schema takes 2.0 for an integer. Here it is a number only, as for a Python or SQL reader of the
answer; ``has_strict_integers=False`` follows the standard. Patterns run on an engine that takes
linear time, or stops: ``^(a+)+$`` hangs other validators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import jsonschema_rs

from tropism.tasks.structured_schema import is_json

Schema = dict[str, Any] | bool


class SchemaVerifier:
    """A compiled schema.

    Args:
        schema: Any JSON Schema; ``$schema`` tells the draft (2020-12 where it is missing). What it
            refers to must be in it, or be a draft's own schema: nothing is fetched.
        has_strict_integers: 2.0 is no integer.
        should_check_formats: ``format`` (date, email, ...) is a condition and not just a remark.

    Raises:
        ValueError: The schema is none, or refers to another document.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        has_strict_integers: bool = True,
        should_check_formats: bool = False,
    ) -> None:
        try:
            self._validator = jsonschema_rs.validator_for(
                schema,
                keywords={"type": _StrictType} if has_strict_integers else None,
                validate_formats=should_check_formats,
                offline=True,
            )
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"no JSON Schema that can be checked offline: {reason}") from error

    def is_valid(self, value: Any) -> bool:
        """Whether ``value`` meets the schema; nothing that JSON cannot say ever does."""
        return is_json(value) and self._validator.is_valid(value)

    def errors(self, value: Any, num: int = 10) -> Sequence[str]:
        """The first ``num`` reasons why ``value`` does not meet the schema; none where it does."""
        if not is_json(value):
            return ["not a JSON value"]
        return [error.message for error in islice(self._validator.iter_errors(value), num)]


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class _StrictType:
    """``type`` in Python's own terms: a bool is no number, a float no integer."""

    def __init__(self, parent_schema: Any, value: Any, schema_path: Any) -> None:
        self._names: Sequence[str] = [value] if isinstance(value, str) else list(value)

    def validate(self, instance: Any) -> None:
        """Raise ValueError unless ``instance`` is of one of the types."""
        if not any(self._is(instance, name) for name in self._names):
            raise ValueError(f"{instance!r:.60} is not of type {', '.join(self._names)}")

    @staticmethod
    def _is(instance: Any, name: str) -> bool:
        if isinstance(instance, bool) or name == "boolean":
            return isinstance(instance, bool) and name == "boolean"
        return isinstance(instance, _TYPES[name])


def closed(schema: Any) -> Any:
    """``schema`` with no keys allowed besides those that an object's ``properties`` name.

    Only objects that say nothing about other keys are closed (no ``additionalProperties``,
    ``patternProperties``, ``unevaluatedProperties``), and none where schemas are combined or
    referred to: there the other keys may be another part's.
    """
    if not isinstance(schema, dict):
        return schema
    if _OPEN & schema.keys():
        return schema
    changed = dict(schema)
    for keyword in ("properties", "$defs", "definitions"):
        if isinstance(changed.get(keyword), dict):
            changed[keyword] = {key: closed(child) for key, child in changed[keyword].items()}
    if isinstance(changed.get("items"), dict):
        changed["items"] = closed(changed["items"])
    if "properties" in changed and not _SAYS_ALREADY & changed.keys():
        changed["additionalProperties"] = False
    return changed


_OPEN = {
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "dependencies",
    "extends",
}
_SAYS_ALREADY = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "propertyNames",
}
