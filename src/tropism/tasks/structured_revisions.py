"""Prompts that take back what they said: a version to show first, and sentences that revise it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tropism.tasks.structured_schema import Field

SCALARS = ("string", "integer", "number", "boolean")


def revise(
    root: Field, unused: Sequence[Field], num: int, draw: random.Random
) -> tuple[Field, list[str]]:
    """What the prompt shows at first instead of ``root``, and ``num`` sentences that lead to it.

    Args:
        root: What an answer must hold in the end.
        unused: Fields of the theme that ``root`` lacks.
        num: How many revisions, each of another kind; fewer where ``root`` does not lend itself.
        draw: The row's generator.
    """
    kinds: list[Callable[[Field, list[Field], random.Random], tuple[Field, str] | None]]
    kinds = [_rename, _drop, _rebound, _require]
    draw.shuffle(kinds)
    spare, sentences = list(unused), list[str]()
    touched: set[str] = set()
    for kind in kinds:
        free = replace(root, fields=tuple(f for f in root.fields if f.name not in touched))
        revision = kind(free, spare, draw) if len(sentences) < num else None
        if revision is None:
            continue
        shown, sentence = revision
        first = {field.name: field for field in shown.fields}
        last = {field.name: field for field in free.fields}
        touched |= {name for name in first | last if first.get(name) != last.get(name)}
        kept = [field for field in root.fields if field.name not in last]
        root = replace(root, fields=(*shown.fields, *kept))
        sentences.append(sentence)
    return root, sentences


def _swap(root: Field, field: Field, first: Field) -> Field:
    return replace(root, fields=tuple(first if f is field else f for f in root.fields))


def _pick(root: Field, draw: random.Random, *kinds: str) -> Field | None:
    fields = [field for field in root.fields if field.kind in kinds and not field.contains]
    return draw.choice(fields) if fields else None


def _rename(root: Field, spare: list[Field], draw: random.Random) -> tuple[Field, str] | None:
    field = _pick(root, draw, *SCALARS)
    if field is None or not spare:
        return None
    old = spare.pop().name
    return (
        _swap(root, field, replace(field, name=old)),
        f'Wait, "{old}" is a poor name: call that key "{field.name}" instead, all else about it '
        "stays as I said.",
    )


def _drop(root: Field, spare: list[Field], draw: random.Random) -> tuple[Field, str] | None:
    if not spare:
        return None
    extra = spare.pop()
    place = draw.randint(0, len(root.fields))
    fields = (*root.fields[:place], extra, *root.fields[place:])
    return (
        replace(root, fields=fields),
        f'On second thought, leave "{extra.name}" out altogether; nobody will look at it.',
    )


def _rebound(root: Field, spare: list[Field], draw: random.Random) -> tuple[Field, str] | None:
    field = _pick(root, draw, "integer")
    if field is None or field.minimum is None or field.maximum is None:
        return None
    first = replace(field, minimum=field.minimum + 1, maximum=field.maximum + draw.randint(10, 99))
    return (
        _swap(root, field, first),
        f'And I got the range of "{field.name}" wrong: it goes from {field.minimum} to '
        f"{field.maximum}.",
    )


def _require(root: Field, spare: list[Field], draw: random.Random) -> tuple[Field, str] | None:
    field = _pick(root, draw, *SCALARS)
    if field is None or field.optional:
        return None
    return (
        _swap(root, field, replace(field, optional=True)),
        f'Forget that "{field.name}" is optional: it must always be there.',
    )
