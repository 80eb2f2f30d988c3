"""XML and Markdown as values: what a text means there, only a schema can tell.

XML: no attributes; a field is an element, the items of a list are ``<item>`` elements.
Markdown: a field is a bullet ``- key: value``, what is inside an object or a list stands in bullets
below ``- key:``; each object of a top-level list has a heading ``## Item 1`` ..., and the wrapper
key is the heading ``# key`` above all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lxml import etree  # type: ignore[import-untyped]
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

MAX_XML_CHARACTERS = 20_000
MAX_MARKDOWN_CHARACTERS = 10_000
MAX_DEPTH = 20

_INTEGER = re.compile(r"-?[0-9]{1,300}")
_NUMBER = re.compile(r"-?[0-9]{1,300}(\.[0-9]{1,300})?([eE][-+]?[0-9]{1,3})?")
_ANY_TEXT: Mapping[str, Any] = {"type": "string"}
# What values need and no more: all else is text, so that odd answers take linear time.
_MARKDOWN = MarkdownIt("zero").enable(["heading", "list", "escape", "entity", "newline"])


class _MalformedError(ValueError):
    pass


def scalar(text: str, schema: Mapping[str, Any]) -> Any:
    """``text`` as the type that ``schema`` asks for; as it is where it cannot be that.

    2.0 is no integer, True and 1 are no booleans.
    """
    kind = schema.get("type")
    if kind == "integer" and _INTEGER.fullmatch(text):
        return int(text)
    if kind == "number" and _NUMBER.fullmatch(text):
        return int(text) if _INTEGER.fullmatch(text) else float(text)
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return text


def _child_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    child: Mapping[str, Any] = schema.get("properties", {}).get(key, _ANY_TEXT)
    return child


# --- XML ------------------------------------------------------------------------------------------


_UNASKED_FOR = (
    "//processing-instruction() | //@* | //namespace::*[name() != 'xml'] | //*[namespace-uri()]"
)


def parse_xml(text: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """``{root: content}`` of an XML text, and whether it has comments; None where it is malformed.

    Malformed are a DOCTYPE of any kind, entities, processing instructions, attributes, namespaces
    (``xmlns``, which gives elements other names), text beside elements, the same element twice in
    an object, and nesting beyond ``MAX_DEPTH``.

    Args:
        text: The whole document.
        schema: Of what the root element holds.
    """
    if len(text) > MAX_XML_CHARACTERS or "<!DOCTYPE" in text:
        return None, False
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, encoding="utf-8"
    )
    try:
        root = etree.fromstring(text.strip().encode("utf-8"), parser)
        if root.getroottree().xpath(_UNASKED_FOR):
            return None, False
        has_comments = bool(root.getroottree().xpath("//comment()"))
        etree.strip_tags(root, etree.Comment)
        return {root.tag: _xml_value(root, schema, 0)}, has_comments
    except (etree.XMLSyntaxError, ValueError):
        return None, False


def _xml_value(element: Any, schema: Mapping[str, Any], depth: int) -> Any:
    children = list(element)
    text = (element.text or "").strip()
    if depth > MAX_DEPTH or any(not isinstance(child.tag, str) for child in children):
        raise _MalformedError("too deep, or an entity")
    kind = schema.get("type")
    if not children:
        if not text and kind in ("object", "array"):
            return {} if kind == "object" else []
        return scalar(text, schema)
    if text or any((child.tail or "").strip() for child in children):
        raise _MalformedError("text beside elements")
    names = [child.tag for child in children]
    if kind == "array" and set(names) == {"item"}:
        return [_xml_value(child, schema["items"], depth + 1) for child in children]
    if len(set(names)) < len(names):
        raise _MalformedError("an element twice")
    return {
        child.tag: _xml_value(child, _child_schema(schema, child.tag), depth + 1)
        for child in children
    }


# --- Markdown -------------------------------------------------------------------------------------


def parse_markdown(text: str, schema: Mapping[str, Any]) -> Any:
    """The object or list that a Markdown text is; None where it is malformed.

    Args:
        text: The whole document.
        schema: Of what stands below the heading with the key, if there is one.
    """
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return None
    nodes = SyntaxTreeNode(_MARKDOWN.parse(text)).children
    key = None
    if nodes and nodes[0].type == "heading" and nodes[0].tag == "h1":
        key = _inline(nodes[0])
        nodes = nodes[1:]
    try:
        content = _markdown_content(nodes, schema)
    except _MalformedError:
        return None
    return content if key is None else {key: content}


def _markdown_content(nodes: Sequence[SyntaxTreeNode], schema: Mapping[str, Any]) -> Any:
    if len(nodes) == 1:
        return _markdown_object(nodes[0], schema)
    items: list[Any] = []
    for heading, bullets in zip(nodes[::2], nodes[1::2], strict=False):
        is_heading = heading.type == "heading" and heading.tag == "h2"
        if not is_heading or _inline(heading) != f"Item {len(items) + 1}":
            raise _MalformedError("no heading of an item")
        items.append(_markdown_object(bullets, schema.get("items", {})))
    if not items or len(nodes) % 2:
        raise _MalformedError("a heading without bullets")
    return items


def _markdown_object(node: SyntaxTreeNode, schema: Mapping[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for text, below in _bullets_of(node):
        key, colon, rest = text.partition(":")
        if not colon or key in value or (below is not None and rest.strip()):
            raise _MalformedError("no key, a key twice, or a text and bullets")
        child = _child_schema(schema, key)
        if below is None:
            value[key] = scalar(rest.strip(), child)
        elif child.get("type") == "array":
            value[key] = _markdown_array(below, child["items"])
        else:
            value[key] = _markdown_object(below, child)
    return value


def _markdown_array(node: SyntaxTreeNode, schema: Mapping[str, Any]) -> list[Any]:
    items: list[Any] = []
    for text, below in _bullets_of(node):
        if below is None:
            items.append(scalar(text, schema))
        elif text == "item:":
            items.append(_markdown_object(below, schema))
        else:
            raise _MalformedError("no item")
    return items


def _bullets_of(node: SyntaxTreeNode) -> list[tuple[str, SyntaxTreeNode | None]]:
    """Text of each bullet, and the bullets below it."""
    if node.type != "bullet_list":
        raise _MalformedError("no bullets")
    bullets: list[tuple[str, SyntaxTreeNode | None]] = []
    for item in node.children:
        types = [child.type for child in item.children]
        if types not in (["paragraph"], ["paragraph", "bullet_list"]):
            raise _MalformedError("a bullet holds a text, and bullets at most")
        below = item.children[1] if len(types) == 2 else None
        bullets.append((_inline(item.children[0]), below))
    return bullets


def _inline(node: SyntaxTreeNode) -> str:
    """Text of a paragraph or heading; a line that is only wrapped goes on with a space."""
    breaks = {"hardbreak": "\n", "softbreak": " "}
    parts = node.children[0].children if node.children else []
    return "".join(breaks.get(part.type, part.content) for part in parts).strip()
