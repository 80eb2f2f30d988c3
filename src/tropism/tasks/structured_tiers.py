"""Tiers of structured output: how hard a schema is, and schemas drawn accordingly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tropism.tasks.structured_names import Names
from tropism.tasks.structured_schema import AWKWARD, Field
from tropism.tasks.structured_vocabulary import Theme


@dataclass(frozen=True)
class Tier:
    """How hard the schemas are.

    Args:
        num_fields: Fewest and most fields at the top level, but for the parts named below.
        num_strings: Fewest and most of them that are strings (at least one).
        num_enums: Enum fields.
        num_nested: Arrays and nested objects.
        should_bound: Integers have a range.
        should_show_example: Every style shows an object of the right form (style "example" always
            does).
        should_lay_out: The prompt says how many objects, under which key, in which fence.
        num_sections: Objects one within the other, each with fields of its own.
        num_lists: Arrays of objects.
        num_awkward: Strings that must contain characters which the format escapes.
        optional_rate: Share of the top-level fields that may be absent.
        length_rate: Share of the strings with a shortest and a longest length.
        num_revisions: Fewest and most times that the prompt takes back something it said.
        is_long: The prompt tells a story around the request.
    """

    num_fields: tuple[int, int]
    num_strings: tuple[int, int]
    num_enums: int = 0
    num_nested: int = 0
    should_bound: bool = False
    should_show_example: bool = True
    should_lay_out: bool = False
    num_sections: int = 0
    num_lists: int = 0
    num_awkward: int = 0
    optional_rate: float = 0.0
    length_rate: float = 0.0
    num_revisions: tuple[int, int] = (0, 0)
    is_long: bool = False


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
    Tier(
        num_fields=(4, 6),
        num_strings=(1, 2),
        num_enums=1,
        num_nested=1,
        should_bound=True,
        should_show_example=False,
        should_lay_out=True,
        optional_rate=0.15,
        length_rate=0.4,
    ),
    Tier(
        num_fields=(5, 7),
        num_strings=(1, 2),
        num_enums=1,
        num_nested=1,
        should_bound=True,
        should_show_example=False,
        should_lay_out=True,
        num_sections=2,
        num_lists=1,
        num_awkward=1,
        optional_rate=0.2,
        length_rate=0.4,
        num_revisions=(1, 2),
        is_long=True,
    ),
)


def draw_schema(tier: Tier, theme: Theme, draw: random.Random) -> Field:
    """One object with fields of ``theme``; sections, lists and awkward strings not yet."""
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


def deepen(
    root: Field, tier: Tier, theme: Theme, names: Names, awkward: Sequence[str], draw: random.Random
) -> tuple[Field, Sequence[Field]]:
    """``root`` with what tiers 3 and 4 have besides, and the fields of ``theme`` still unused.

    Args:
        root: What ``draw_schema`` gave.
        tier: Counts and rates.
        theme: Where further fields come from.
        names: What sections, lists and awkward strings are called.
        awkward: Names of ``AWKWARD`` that the format can hold.
        draw: The row's generator.
    """
    used = {field.name for field in root.fields}
    spare = [field for field in (*theme.strings, *theme.others) if field.name not in used]
    draw.shuffle(spare)
    unused = iter([_bounded(field, tier, draw) for field in spare])
    fields = [_bounded(field, tier, draw) for field in root.fields]
    parts = [
        Field(name, "array", items=Field("item", "object", fields=tuple(islice(unused, 2))))
        for name in draw.sample(names.lists, tier.num_lists)
    ]
    for name in draw.sample(names.sections, tier.num_sections):
        inner = (*islice(unused, 2), *parts)
        parts = [Field(name, "object", fields=inner)]
    for name in draw.sample(names.awkward, tier.num_awkward):
        contains = tuple(draw.sample(sorted(awkward), draw.randint(1, 2)))
        fields.append(Field(name, "string", contains=contains))
    fields = _with_optional([*fields, *parts], tier.optional_rate, draw)
    draw.shuffle(fields)
    return replace(root, fields=tuple(fields)), tuple(unused)


def awkward_for(format: str) -> Sequence[str]:
    """Names of ``AWKWARD`` that a value of this format can hold without a convention of its own."""
    return [name for name in AWKWARD if format != "markdown" or name != "a line break"]


def _bounded(field: Field, tier: Tier, draw: random.Random) -> Field:
    if field.kind != "string" or draw.random() >= tier.length_rate:
        return field
    return replace(field, minimum=draw.randint(2, 5), maximum=draw.randint(30, 80))


def _with_optional(fields: Sequence[Field], rate: float, draw: random.Random) -> list[Field]:
    """Some fields optional, but never the first string: every answer has something to say."""
    first = next(field for field in fields if field.kind == "string")
    return [
        replace(field, optional=field is not first and draw.random() < rate) for field in fields
    ]
