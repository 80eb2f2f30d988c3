"""Strict parsers of model output, one per format: an object, or None for what is malformed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARACTERS = 20_000
"""Longer answers are malformed: no schema here needs a tenth of it."""

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)


def parse_json(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, as a whole or as one fenced block.

    Plain JSON and a single fence (bare or marked ``json``) are both fine. Text before or after,
    a second block, NaN, Infinity, duplicate keys, single quotes, lone surrogates and nesting
    beyond Python's limit make it malformed.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    body = text.strip()
    fenced = _FENCE.fullmatch(body)
    if fenced is not None:
        body = fenced.group(1)
    try:
        value = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
        # A lone surrogate (an escaped half of an emoji) is no text: nothing can store it.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


PARSERS: Mapping[str, Callable[[str], dict[str, Any] | None]] = {"json": parse_json}
