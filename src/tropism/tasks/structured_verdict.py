"""Judging an answer against a schema and a layout, strictly or as IFStruct's validator does.

What the public validator of IFStruct v1.0 lets pass, and ``strict`` does not:
    a fence that the prompt forbade; text between two fences; a second fence
    NaN and Infinity; duplicate keys; comments in YAML (``# Sure, here you go``)
    empty strings, strings copied from the prompt, the same object or string again and again
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tropism.tasks.structured_echo import all_same, has_repeats, is_blank_or_echo, words
from tropism.tasks.structured_formats import LENIENT, MAX_CHARACTERS, STRICT, parse_json
from tropism.tasks.structured_layout import Format, Layout
from tropism.tasks.structured_schema import (
    answer_paths,
    free_strings,
    has_kind,
    is_valid,
    schema_paths,
)

_OPENING = re.compile(r"```([^\s`]*)")
_ALIASES: Mapping[Format, Sequence[str]] = {
    "json": ("", "json"),
    "yaml": ("", "yaml", "yml"),
    "xml": ("", "xml"),
    "markdown": ("", "markdown", "md"),
}


@dataclass(frozen=True)
class Blocks:
    """The fenced blocks of a text.

    Args:
        inside: Language and text of each.
        outside: Text before the first, between them and after the last; one more than ``inside``.
        is_closed: The last of them ends.
    """

    inside: tuple[tuple[str, str], ...]
    outside: tuple[str, ...]
    is_closed: bool


def blocks_of(text: str) -> Blocks:
    """Take a text apart at the lines that open and close fences."""
    inside: list[tuple[str, str]] = []
    outside: list[str] = []
    lines: list[str] = []
    language: str | None = None
    for line in text.split("\n"):
        opening = _OPENING.fullmatch(line.strip())
        if language is None and opening is not None:
            outside.append("\n".join(lines))
            language, lines = opening.group(1).lower(), []
        elif language is not None and line.strip() == "```":
            inside.append((language, "\n".join(lines)))
            language, lines = None, []
        else:
            lines.append(line)
    outside.append("\n".join(lines))
    return Blocks(tuple(inside), tuple(outside), language is None)


def only_body(text: str, blocks: Blocks, format: Format) -> str | None:
    """What is between the only fence of a text, or all of it where there is none.

    None where there is more than one, an open one, or one that is marked as another format.
    """
    if len(text) > MAX_CHARACTERS or not blocks.is_closed or len(blocks.inside) > 1:
        return None
    language, body = blocks.inside[0] if blocks.inside else ("", text)
    return body if language in _ALIASES[format] else None


def made_up(items: Sequence[Mapping[str, Any]], schema: Mapping[str, Any], prompt: str) -> bool:
    """Whether the free strings of valid objects come from the model rather than the prompt.

    No string is blank or an echo, no array holds the same twice, no object has one string
    everywhere, and no two objects have the same strings.
    """
    seen = set()
    for item in items:
        fields = list(free_strings(item, schema))
        strings = [string for field in fields for string in field]
        if any(is_blank_or_echo(string, prompt) for string in strings):
            return False
        if all_same(strings) or any(has_repeats(field) for field in fields):
            return False
        seen.add(tuple(tuple(words(string)) for string in strings))
    return len(seen) == len(items)


def plain(completion: str, schema: Mapping[str, Any], prompt: str) -> dict[str, float]:
    """``strict`` but for ``form``, of one JSON object: plain, or as the only fenced block."""
    value = parse_json(completion)
    if value is None:
        return dict.fromkeys(("parse", "keys", "types", "pass"), 0.0)
    return {
        "parse": 1.0,
        "keys": _share_of_keys(value, schema),
        "types": _share_of_types(value, schema),
        "pass": float(_is_exact(value, schema) and made_up([value], schema, prompt)),
    }


def strict(
    completion: str, schema: Mapping[str, Any], layout: Layout, prompt: str
) -> dict[str, float]:
    """``parse``, ``form``, ``keys``, ``types`` and ``pass``; all 0 for what does not parse.

    Args:
        completion: The model's answer.
        schema: Of one object.
        layout: How many of them, and how they stand.
        prompt: What the model read; strings copied from it do not pass.
    """
    nothing = dict.fromkeys(("parse", "form", "keys", "types", "pass"), 0.0)
    blocks = blocks_of(completion)
    body = only_body(completion, blocks, layout.format)
    if body is None:
        return nothing
    parsed = STRICT[layout.format](body, layout.content_schema(schema))
    if parsed is None:
        return nothing
    has_chatter = bool(blocks.inside) and any(map(str.strip, blocks.outside))
    content, is_wrapped_right = _unwrapped(parsed.value, layout, schema)
    items, has_right_count = _items(content, layout)
    form = (
        {"required": bool(blocks.inside), "forbidden": not blocks.inside}.get(layout.fence, True),
        layout.can_comment or not (has_chatter or parsed.has_comments),
        is_wrapped_right,
        has_right_count,
    )
    is_right = all(form) and all(_is_exact(item, schema) for item in items)
    return {
        "parse": 1.0,
        "form": sum(form) / len(form),
        "keys": _mean([_share_of_keys(item, schema) for item in items]),
        "types": _mean([_share_of_types(item, schema) for item in items]),
        "pass": float(is_right and made_up(items, schema, prompt)),
    }


def ifstruct_compat(completion: str, schema: Mapping[str, Any], layout: Layout) -> float:
    """1 for what the public validator passes, 0 otherwise; arguments as for ``strict``."""
    blocks = blocks_of(completion)
    if len(completion) > MAX_CHARACTERS or not blocks.is_closed:
        return 0.0
    body = blocks.inside[0][1] if blocks.inside else completion
    around = (blocks.outside[0], blocks.outside[-1]) if blocks.inside else ()
    if layout.fence == "required" and not blocks.inside:
        return 0.0
    if not layout.can_comment and any(map(str.strip, around)):
        return 0.0
    parsed = LENIENT[layout.format](body, layout.content_schema(schema))
    if parsed is None:
        return 0.0
    content, is_wrapped_right = _unwrapped(_finite(parsed.value), layout, schema)
    items, has_right_count = _items(content, layout)
    is_right = is_wrapped_right and has_right_count
    return float(is_right and all(_is_exact(item, schema) for item in items))


def _unwrapped(value: Any, layout: Layout, schema: Mapping[str, Any]) -> tuple[Any, bool]:
    """What stands under the top-level key, and whether it is the right key, or rightly none."""
    if not isinstance(value, dict) or len(value) != 1:
        return value, layout.key is None
    (key, inner), *_ = value.items()
    if key == layout.key:
        return inner, True
    is_wrapped = key not in schema["properties"] and isinstance(inner, dict | list)
    return (inner, False) if is_wrapped else (value, layout.key is None)


def _items(content: Any, layout: Layout) -> tuple[list[dict[str, Any]], bool]:
    """The objects of an answer, and whether there are as many as there must be."""
    entries = content if isinstance(content, list) else [content]
    items = [entry for entry in entries if isinstance(entry, dict)]
    if len(items) < len(entries) or isinstance(content, list) != (layout.count is not None):
        return items, False
    fewest, most = layout.count or (1, 1)
    return items, fewest <= len(items) <= most


def _is_exact(item: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    given = answer_paths(item, schema)
    required, allowed = schema_paths(schema, only_required=True), schema_paths(schema)
    return required <= given <= allowed and is_valid(item, schema)


def _share_of_keys(item: Mapping[str, Any], schema: Mapping[str, Any]) -> float:
    given = answer_paths(item, schema)
    required, allowed = schema_paths(schema, only_required=True), schema_paths(schema)
    return len(allowed & given) / len(required | given)


def _share_of_types(item: Mapping[str, Any], schema: Mapping[str, Any]) -> float:
    given = [
        key in item and has_kind(item[key], child)
        for key, child in schema["properties"].items()
        if key in item or key in schema["required"]
    ]
    return sum(given) / len(given)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _finite(value: Any) -> Any:
    """NaN and infinity as 0.0: the public validator takes them for numbers like any other."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return 0.0 if isinstance(value, float) and not math.isfinite(value) else value
