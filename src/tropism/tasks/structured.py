"""Structured output: make up a thing and write it as one object that meets a schema.

A sample prompt (tier 1, style "bullets") and an answer that passes:
    Make up a lighthouse. Answer with one line of JSON like {"keeper": "...", "floor_total": 31,
    "haunted": true} and nothing else. The keys:
    - keeper: text
    - floor_total: whole number
    - haunted: true or false

    {"keeper": "Ada Holm", "floor_total": 6, "haunted": false}

Procedural, after IFStruct v1.0 (Liquid AI): entity -> schema -> prompt style. Train, validation
and test share no field name, entity or enum value. The answer may be plain JSON or one fenced
block, in every tier.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.splits import NotEnoughPromptsError, check_split
from tropism.tasks.structured_echo import all_same, has_repeats, is_blank_or_echo
from tropism.tasks.structured_formats import PARSERS
from tropism.tasks.structured_prompts import STYLES, render
from tropism.tasks.structured_schema import (
    Field,
    answer_paths,
    free_strings,
    has_kind,
    is_valid,
    json_schema,
    schema_paths,
)
from tropism.tasks.structured_vocabulary import INVENTED_STRINGS, THEMES, Theme
from tropism.types import Prompt


@dataclass(frozen=True)
class Tier:
    """How hard the schemas are.

    Args:
        num_fields: Fewest and most fields at the top level.
        num_strings: Fewest and most of them that are strings (at least one).
        num_enums: Enum fields.
        num_nested: Arrays and nested objects.
        should_bound: Integers have a range.
        should_show_example: Every style shows an object of the right form (style "example" always
            does).
    """

    num_fields: tuple[int, int]
    num_strings: tuple[int, int]
    num_enums: int = 0
    num_nested: int = 0
    should_bound: bool = False
    should_show_example: bool = True


TIERS: Sequence[Tier] = (
    Tier(num_fields=(1, 2), num_strings=(1, 1)),
    Tier(num_fields=(3, 4), num_strings=(1, 2)),
    Tier(
        num_fields=(5, 6),
        num_strings=(1, 2),
        num_enums=1,
        num_nested=1,
        should_bound=True,
        should_show_example=False,
    ),
)

_PATIENCE = 1000
"""So many rows in a row without a new prompt mean that there is none left."""


class StructuredOutput(Task):
    """Procedural schemas, scored strictly.

    Components: ``parse`` (the answer is one JSON object, strictly), ``keys`` (shared key paths
    over all key paths, 1 only for exactly the right keys), ``types`` (share of the top-level
    fields that are present with the right type) and ``pass`` (binary: all of them, enums, bounds,
    and every made-up string neither blank nor copied from the prompt, nor all strings the same).

    Args:
        tier: 0 (1-2 flat fields), 1 (3-4 typed fields) or 2 (5-6 fields with an enum, ranges, and
            an array or a nested object).
        name: Identifies the task in records and metrics.

    Raises:
        ValueError: No such tier.
    """

    components: ClassVar[tuple[str, ...]] = ("parse", "keys", "types", "pass")
    primary: ClassVar[str] = "pass"

    def __init__(self, tier: int = 1, name: str = "structured") -> None:
        if tier not in range(len(TIERS)):
            raise ValueError(f"tier={tier}: choose from 0 to {len(TIERS) - 1}.")
        self.tier = tier
        self.name = name

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct prompts; more of them begin with the same ones.

        Raises:
            NotEnoughPromptsError: The tier has fewer distinct prompts than that.
            ValueError: Unknown split.
        """
        check_split(split)
        prompts: dict[str, Prompt] = {}
        num_misses = row = 0
        while len(prompts) < num and num_misses < _PATIENCE:
            prompt = self._prompt(split, f"{self.tier}/{split}/{seed}/{row}")
            num_misses = num_misses + 1 if prompt.id in prompts else 0
            prompts.setdefault(prompt.id, prompt)
            row += 1
        if len(prompts) < num:
            raise NotEnoughPromptsError(
                self.name, split, num, len(prompts), f"take a tier above {self.tier}"
            )
        return list(prompts.values())

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """``parse``, ``keys``, ``types`` and ``pass``; all 0 for what does not parse."""
        schema: Mapping[str, Any] = prompt.columns["schema"]
        value = PARSERS[prompt.columns["format"]](completion)
        if value is None:
            return {"parse": 0.0, "keys": 0.0, "types": 0.0, "pass": 0.0}
        wanted, given = schema_paths(schema), answer_paths(value, schema)
        properties: Mapping[str, Any] = schema["properties"]
        well_typed = [
            key in value and has_kind(value[key], child) for key, child in properties.items()
        ]
        passes = wanted == given and is_valid(value, schema) and _is_made_up(value, prompt)
        return {
            "parse": 1.0,
            "keys": len(wanted & given) / len(wanted | given),
            "types": sum(well_typed) / len(well_typed),
            "pass": float(passes),
        }

    def gold(self, prompt: Prompt) -> str | None:
        """One line of JSON that passes, its strings out of a fixed list."""
        draw = random.Random(f"gold/{prompt.columns['row_hash']}")
        strings = iter(draw.sample(INVENTED_STRINGS, len(INVENTED_STRINGS)))  # none twice
        return json.dumps(_invented(prompt.columns["schema"], strings, draw))

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """``constant``: one fixed object. ``schema_echo``: the block of the prompt that shows the
        schema, as it is. ``schema_echo_json``: the right keys and types, filled from the schema.
        """
        return {
            "constant": lambda prompt: '{"name": "Ada Holm", "age": 36, "active": true}',
            "schema_echo": lambda prompt: str(prompt.columns["block"]),
            "schema_echo_json": lambda prompt: json.dumps(_filled(prompt.columns["schema"])),
        }

    def _prompt(self, split: Split, key: str) -> Prompt:
        """The prompt of one row; ``key`` seeds it."""
        row_hash = hashlib.sha256(key.encode()).hexdigest()
        draw = random.Random(row_hash)
        theme = draw.choice(THEMES[split])
        tier = TIERS[self.tier]
        root = _draw_schema(tier, theme, draw)
        noun = draw.choice(theme.entities)
        style = draw.choice(sorted(STYLES))
        text, block = render(
            style, noun, root, should_show_example=tier.should_show_example, draw=draw
        )
        return Prompt(
            id=f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}",
            task=self.name,
            messages=({"role": "user", "content": text},),
            columns={
                "schema": json_schema(root),
                "block": block,
                "format": "json",
                "style": style,
                "entity": noun,
                "row_hash": row_hash,
            },
        )


def _draw_schema(tier: Tier, theme: Theme, draw: random.Random) -> Field:
    num_fields = draw.randint(*tier.num_fields)
    num_strings = min(draw.randint(*tier.num_strings), num_fields)
    enums = [field for field in theme.rich if field.kind == "enum"]
    nested = [field for field in theme.rich if field.kind != "enum"]
    fields = [
        *draw.sample(theme.strings, num_strings),
        *draw.sample(enums, tier.num_enums),
        *draw.sample(nested, tier.num_nested),
    ]
    fields += draw.sample(theme.others, num_fields - len(fields))
    draw.shuffle(fields)
    if not tier.should_bound:
        fields = [replace(field, minimum=None, maximum=None) for field in fields]
    return Field("answer", "object", fields=tuple(fields))


def _is_made_up(value: Mapping[str, Any], prompt: Prompt) -> bool:
    """Whether the free strings of a valid answer come from the model rather than the prompt."""
    assert prompt.messages is not None
    text = prompt.messages[-1]["content"]
    fields = list(free_strings(value, prompt.columns["schema"]))
    strings = [string for field in fields for string in field]
    if any(is_blank_or_echo(string, text) for string in strings):
        return False
    return not all_same(strings) and not any(has_repeats(items) for items in fields)


def _invented(schema: Mapping[str, Any], strings: Iterator[str], draw: random.Random) -> Any:
    """A value that meets ``schema``, made up."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if schema["type"] == "object":
        fields = schema["properties"].items()
        return {name: _invented(child, strings, draw) for name, child in fields}
    if schema["type"] == "array":
        return list(islice(strings, draw.randint(1, 3)))
    if schema["type"] == "string":
        return next(strings)
    if schema["type"] == "boolean":
        return draw.random() < 0.5
    value = draw.randint(schema.get("minimum", 2), schema.get("maximum", 60))
    return value if schema["type"] == "integer" else value + draw.randint(1, 9) / 10


def _filled(schema: Mapping[str, Any], key: str = "") -> Any:
    """The laziest value that meets ``schema``: each string is the name of its own field."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: _filled(child, name) for name, child in schema["properties"].items()}
    if schema["type"] == "array":
        return [_filled(schema["items"], key)]
    lowest = schema.get("minimum", 1)
    return {"string": key, "integer": lowest, "number": lowest, "boolean": True}[schema["type"]]
