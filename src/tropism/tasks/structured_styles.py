"""Six ways to say what an object must hold, for schemas with parts inside parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tropism.tasks.structured_layout import XML_ROOT, Layout
from tropism.tasks.structured_prompts import TYPE_WORDS
from tropism.tasks.structured_schema import Field, json_schema
from tropism.tasks.structured_writers import write


def walk(field: Field, path: str = "") -> Iterator[tuple[str, Field]]:
    """Path and field of all that is inside ``field``: ``details.year``, ``reviews[].rating``."""
    for child in field.fields:
        here = f"{path}{child.name}"
        yield here, child
        inner = child.items if child.kind == "array" else child
        assert inner is not None
        yield from walk(inner, f"{here}[]." if child.kind == "array" else f"{here}.")


def describe(field: Field) -> str:
    """What a value must be, but for what is inside it: "whole number from 2 to 9; optional"."""
    return _value_words(field) + ("; optional" if field.optional else "")


def _value_words(field: Field) -> str:
    if field.kind == "enum":
        return "one of " + ", ".join(f'"{option}"' for option in field.options)
    if field.kind == "array":
        assert field.items is not None
        return f"list of 1 to 5 different {'texts' if field.items.kind == 'string' else 'objects'}"
    if field.kind == "object":
        return "object"
    words = TYPE_WORDS[field.kind]
    if field.minimum is not None and field.maximum is not None:
        unit = " characters" if field.kind == "string" else ""
        words += f"{' of' if unit else ' from'} {field.minimum} to {field.maximum}{unit}"
    if field.contains:
        words += " with " + " and ".join(field.contains) + " in it"
    return words


def _chat(root: Field, layout: Layout) -> str:
    return f"What I want to see is this: {_clauses(root)}."


def _clauses(field: Field) -> str:
    phrases = []
    for child in field.fields:
        phrase = f'"{child.name}" ({describe(child)}'
        inner = child.items if child.kind == "array" else child
        assert inner is not None
        if inner.fields:
            each = ", in each of them " if child.kind == "array" else ", and in it "
            phrase += f"{each}{_clauses(inner)}"
        phrases.append(phrase + ")")
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def _paths(root: Field, layout: Layout) -> str:
    return "\n".join(f"- {path}: {describe(field)}" for path, field in walk(root))


def _schema(root: Field, layout: Layout) -> str:
    return json.dumps(json_schema(root), indent=1)


def _annotated(root: Field, layout: Layout) -> str:
    entry = _annotation(root)
    return write([entry] if layout.count else entry, replace(layout, fence="forbidden"))


def _annotation(field: Field) -> Any:
    if field.kind == "object":
        return {child.name: _annotation(child) for child in field.fields}
    if field.kind == "array":
        assert field.items is not None
        return [_annotation(field.items)] if field.items.fields else ["(text)", "(another text)"]
    return f"({describe(field)})".replace('"', "")


def _glossary(root: Field, layout: Layout) -> str:
    lines = []
    for path, field in walk(root):
        parent = path.rpartition(".")[0]
        where = ""
        if parent:
            where = f", in each of {parent[:-2]}" if parent.endswith("[]") else f", inside {parent}"
        lines.append(f"{field.name} = {describe(field)}{where}")
    return "\n".join(sorted(lines))


def _table(root: Field, layout: Layout) -> str:
    rows = [
        f"| {path} | {_value_words(field)} | {'no' if field.optional else 'yes'} |"
        for path, field in walk(root)
    ]
    return "\n".join(["| key | value | required |", "|---|---|---|", *rows])


DOCUMENT_STYLES: Mapping[str, tuple[str, Callable[[Field, Layout], str]]] = {
    "chat": ("{block}", _chat),
    "paths": ("These are the keys, with their paths:\n{block}", _paths),
    "schema": ("JSON Schema of {one}:\n{block}", _schema),
    "annotated": ("An answer has this form, with your own values:\n{block}", _annotated),
    "glossary": ("Glossary of the keys:\n{block}", _glossary),
    "table": ("The keys:\n{block}", _table),
}
"""Style -> (the sentence around the block, how the block is made)."""


def layout_sentences(layout: Layout) -> Sequence[str]:
    """What ``layout`` asks for, but for how many objects, one sentence or two each."""
    return [
        _format_sentence(layout),
        _wrapper_sentence(layout),
        *_fence_sentences(layout),
    ]


def count_phrase(count: tuple[int, int] | None, noun: str) -> str:
    """``a lighthouse``, ``exactly 3 entries, each a lighthouse``, ``2 to 4 entries, ...``."""
    if count is None:
        return with_article(noun)
    fewest, most = count
    number = f"exactly {fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{number} different entries, each {with_article(noun)}"


def with_article(noun: str) -> str:
    """``a dog``, ``an atlas``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


FORMAT_NAMES = {"json": "JSON", "yaml": "YAML", "xml": "XML", "markdown": "Markdown"}


def _format_sentence(layout: Layout) -> str:
    if layout.format == "json":
        return "Answer in JSON."
    if layout.format == "yaml":
        return "Answer in YAML, in block style, without braces or brackets."
    if layout.format == "xml":
        return "Answer in XML without attributes; the items of a list are <item> elements."
    heading = " Above each entry stands a heading, ## Item 1, ## Item 2 and so on."
    return (
        "Answer in Markdown: each key is a bullet, `- key: value`. What belongs inside a key stands"
        " in bullets below it, indented by two spaces; an object in a list is a bullet `- item:`"
        " with bullets below." + (heading if layout.count else "")
    )


def _wrapper_sentence(layout: Layout) -> str:
    if layout.format == "xml":
        return f"The root element is <{layout.wrapper or XML_ROOT}>."
    what = "the list" if layout.count else "the object"
    if layout.format == "markdown":
        if layout.wrapper is None:
            return "There is no title above."
        return f"The first line is the title, # {layout.wrapper}."
    if layout.wrapper is None:
        return f"At the top level stands {what} itself, under no other key."
    return f'At the top level stands one key, "{layout.wrapper}", and under it {what}.'


def _fence_sentences(layout: Layout) -> Iterator[str]:
    if layout.fence == "required":
        yield "Put the answer into one fenced code block."
    elif layout.fence == "forbidden":
        yield "Do not use a code block."
    if layout.can_comment:
        yield "You may say a word or two before or after the block."
    else:
        yield "Write nothing else, no comment and no explanation."
