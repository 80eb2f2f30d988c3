"""How a schema is put to the model: prompt styles, each with the block of text that shows it.

With an example of the right form ("... like {"keeper": "...", "stairs": 12} and nothing else")
SmolLM2-135M-Instruct passes about a third of the flat schemas when greedy; without one, a few in a
hundred. The strings of an example are dots, so that copying it never passes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tropism.tasks.structured_schema import Field, json_schema

TYPE_WORDS: Mapping[str, str] = {
    "string": "text",
    "integer": "whole number",
    "number": "decimal number",
    "boolean": "true or false",
}
"""How types are called in prose; the raw schema uses JSON Schema's own words."""


def _words(field: Field) -> str:
    if field.kind == "enum":
        return "one of " + ", ".join(f'"{option}"' for option in field.options)
    if field.kind == "array":
        return "list of 1 to 5 different texts"
    if field.kind == "object":
        inner = " and ".join(f'"{child.name}" ({_words(child)})' for child in field.fields)
        return f"object with {inner}"
    bounds = ""
    if field.minimum is not None and field.maximum is not None:
        bounds = f" from {field.minimum} to {field.maximum}"
    return TYPE_WORDS[field.kind] + bounds


def _prose(root: Field) -> str:
    phrases = []
    for field in root.fields:
        article = {"integer": "a ", "number": "a ", "array": "a ", "object": "an "}
        phrases.append(f'"{field.name}" is {article.get(field.kind, "")}{_words(field)}')
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def _bullets(root: Field) -> str:
    return "\n".join(f"- {field.name}: {_words(field)}" for field in root.fields)


def _schema(root: Field) -> str:
    return json.dumps(json_schema(root)["properties"])


def _table(root: Field) -> str:
    rows = [f"| {field.name} | {_words(field)} |" for field in root.fields]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def example_of(field: Field, draw: random.Random) -> Any:
    """A value of the right form, with dots for text."""
    if field.kind == "object":
        return {child.name: example_of(child, draw) for child in field.fields}
    if field.kind == "array":
        return ["...", "..."]
    if field.kind == "enum":
        return draw.choice(field.options)
    if field.kind == "integer":
        low, high = field.minimum, field.maximum
        return draw.randint(2 if low is None else low, 60 if high is None else high)
    if field.kind == "number":
        return draw.randint(2, 60) + draw.randint(1, 9) / 10
    return draw.random() < 0.5 if field.kind == "boolean" else "..."


STYLES: Mapping[str, tuple[str, Callable[[Field], str] | None]] = {
    "example": ("{request}", None),
    "bullets": ("{request} The keys:\n{block}", _bullets),
    "table": ("{request} The keys:\n{block}", _table),
    "prose": ("{request} Here {block}.", _prose),
    # Behind the request, a small model writes the schema down again.
    "schema": ("JSON schema of the keys: {block}\n{request}", _schema),
}
"""Style -> (how request and block stand, how the block is made; None: the example is the block)."""


def render(
    style: str, noun: str, root: Field, *, should_show_example: bool, draw: random.Random
) -> tuple[str, str]:
    """The text of one prompt, and the block in it that shows the schema."""
    template, make_block = STYLES[style]
    example = json.dumps(example_of(root, draw))
    if make_block is None:
        example = block = example.replace('"..."', "<text>")
        should_show_example = True
    else:
        block = make_block(root)
    article = "an" if noun[0] in "aeiou" else "a"
    like = f" like {example}" if should_show_example else ""
    request = f"Make up {article} {noun}. Answer with one line of JSON{like} and nothing else."
    return template.format(request=request, block=block), block
