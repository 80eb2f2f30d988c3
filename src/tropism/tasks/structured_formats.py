"""Strict parsers of model output: a value, or None for what is malformed.

JSON and YAML are here, with the tables of all four; XML and Markdown, whose values are text until
a schema says what they are, in ``structured_markup``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

from tropism.tasks.structured_layout import Format
from tropism.tasks.structured_markup import parse_markdown, parse_xml

MAX_CHARACTERS = 20_000
"""Longer answers are malformed: no schema here needs a tenth of it."""
MAX_DEPTH = 20

_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
_HEADER_COMMENT = re.compile(r"[|>][-+0-9]*[ \t]+#")


class Parsed(NamedTuple):
    """What an answer says, and whether it says more beside it, in comments."""

    value: dict[str, Any] | list[Any]
    has_comments: bool = False


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
    value = load_json(body)
    return value if isinstance(value, dict) else None


def load_json(text: str) -> Any:
    """The value of a JSON text; None for what is malformed as ``parse_json`` says, and for null."""
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
        # A lone surrogate (an escaped half of an emoji) is no text: nothing can store it.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


class _StrictLoader(yaml.CSafeLoader):  # type: ignore[misc]
    """YAML whose keys are texts, each once; ``<<`` is none."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
        if len(set(keys)) < len(node.value):
            raise yaml.YAMLError("a key that is no text, or twice the same")
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str, loader: Any = _StrictLoader, *, can_flow: bool = False) -> Any:
    """The value of a YAML text in block style; None for what is malformed.

    Flow style (``{``, ``[``) unless ``can_flow``, anchors, tags, several documents and nesting
    beyond ``MAX_DEPTH`` are malformed; the strict loader takes duplicate and non-text keys for
    malformed too.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    depth = 0
    try:
        # Events come as the scanner reads, so that 3,000 brackets are never read.
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH or (event.flow_style and not can_flow):
                    return None
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if isinstance(event, yaml.NodeEvent) and (
                event.anchor is not None or getattr(event, "tag", None) is not None
            ):
                return None
        return yaml.load(text, Loader=loader)
    # a date such as 2020-13-45 is a ValueError, 0:0: ... :0.5 to the base of 60 an OverflowError
    except (yaml.YAMLError, ValueError, OverflowError):
        return None


def has_yaml_comments(text: str) -> bool:
    """Whether a well-formed YAML text has comments: what stands between its tokens."""
    end = 0
    for token in yaml.scan(text, Loader=yaml.CSafeLoader):
        start, stop = token.start_mark.index, token.end_mark.index
        if "#" in text[end:start] or _HEADER_COMMENT.match(text[start:stop]):
            return True
        end = max(end, stop)
    return "#" in text[end:]


def _strict_json(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    return _document(load_json(text))


def _strict_yaml(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    parsed = _document(load_yaml(text))
    return parsed and parsed._replace(has_comments=has_yaml_comments(text))


def _strict_xml(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    return _document(*parse_xml(text[: MAX_CHARACTERS + 1], schema))


def _strict_markdown(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    return _document(parse_markdown(text, schema))


def _document(value: Any, has_comments: bool = False) -> Parsed | None:
    return Parsed(value, has_comments) if isinstance(value, dict | list) else None


def _lenient_json(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    try:
        return _document(json.loads(text)) if len(text) <= MAX_CHARACTERS else None
    except (ValueError, RecursionError):
        return None


def _lenient_yaml(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    return _document(load_yaml(text, yaml.CSafeLoader))


def _lenient_markdown(text: str, schema: Mapping[str, Any]) -> Parsed | None:
    return _document(parse_markdown(text.replace("**", ""), schema))


Parser = Callable[[str, Mapping[str, Any]], Parsed | None]

STRICT: Mapping[Format, Parser] = {
    "json": _strict_json,
    "yaml": _strict_yaml,
    "xml": _strict_xml,
    "markdown": _strict_markdown,
}
"""Format -> parser of a text without its fence, and of the schema of what stands under the key."""

LENIENT: Mapping[Format, Parser] = {
    "json": _lenient_json,
    "yaml": _lenient_yaml,
    "xml": _strict_xml,
    "markdown": _lenient_markdown,
}
"""The same as the public validator of IFStruct reads: NaN, duplicate keys and comments pass.

It knows JSON and YAML only. In Markdown bold type passes; XML is as in ``STRICT``.
"""
