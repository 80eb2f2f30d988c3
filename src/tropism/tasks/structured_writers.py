"""Values written as JSON, YAML, XML or Markdown, in the form that the parsers here accept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from lxml import etree  # type: ignore[import-untyped]

from tropism.tasks.structured_layout import Format, Layout

_MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#+\-!|~&])")
_LOOKS_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s)")


def write(content: Any, layout: Layout) -> str:
    """``content`` (one object, or a list of them) as an answer that obeys ``layout``."""
    body = WRITERS[layout.format](content, layout.key)
    return f"```{layout.format}\n{body}\n```" if layout.fence == "required" else body


def _wrapped(content: Any, key: str | None) -> Any:
    return content if key is None else {key: content}


def write_json(content: Any, key: str | None) -> str:
    """Indented JSON."""
    return json.dumps(_wrapped(content, key), indent=2, ensure_ascii=False)


class _Dumper(yaml.CSafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True  # the parsers take no anchors


def write_yaml(content: Any, key: str | None) -> str:
    """YAML in block style."""
    text: str = yaml.dump(
        _wrapped(content, key),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=10_000,
    )
    return text.rstrip("\n")


def write_xml(content: Any, key: str | None) -> str:
    """XML without attributes; the items of a list are ``<item>`` elements."""
    assert key is not None
    text: str = etree.tostring(_element(key, content), pretty_print=True, encoding="unicode")
    return text.rstrip("\n")


def _element(name: str, value: Any) -> Any:
    element = etree.Element(name)
    if isinstance(value, dict):
        element.extend([_element(key, item) for key, item in value.items()])
    elif isinstance(value, list):
        element.extend([_element("item", item) for item in value])
    else:
        element.text = plain(value)
    return element


def write_markdown(content: Any, key: str | None) -> str:
    """One bullet per field; a heading above for the key, and one for each object of a list."""
    lines = [] if key is None else [f"# {_escaped(key)}", ""]
    if isinstance(content, dict):
        return "\n".join([*lines, *_bullets(content, "")])
    for number, item in enumerate(content, start=1):
        lines += [f"## Item {number}", "", *_bullets(item, ""), ""]
    return "\n".join(lines).rstrip("\n")


def _bullets(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _bullet(f"{_escaped(key)}:", item, indent)
        return
    for item in value:
        if isinstance(item, dict):
            yield from _bullet("item:", item, indent)
        else:
            yield f"{indent}- {_escaped(plain(item))}"


def _bullet(label: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict | list):
        yield f"{indent}- {label}"
        yield from _bullets(value, indent + "  ")
    else:
        yield f"{indent}- {label} {_escaped(plain(value))}"


def _escaped(text: str) -> str:
    # Within a word an underscore means nothing, and models leave it alone.
    text = _MARKDOWN_SPECIAL.sub(r"\\\1", text).replace("\\_", "_")
    return _LOOKS_NUMBERED.sub(r"\1\\\2", text).replace("\n", "\\\n")


def plain(value: Any) -> str:
    """A scalar as XML and Markdown show it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


WRITERS: Mapping[Format, Callable[[Any, str | None], str]] = {
    "json": write_json,
    "yaml": write_yaml,
    "xml": write_xml,
    "markdown": write_markdown,
}
