"""Blocks between tags in a completion: ``<think>`` ... ``</think>``, counted and taken apart.

Nothing here searches by patterns, which take quadratic time on a completion of nothing but tags.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAME = re.compile(r"[A-Za-z][\w-]*")


def tags_of(blocks: Sequence[str]) -> tuple[str, ...]:
    """Opening and closing tag of each block, in order."""
    return tuple(tag for name in blocks for tag in (f"<{name}>", f"</{name}>"))


def check_blocks(setting: str, blocks: Sequence[str]) -> None:
    """Raise ValueError unless ``blocks`` are names of tags, each once, at least one."""
    is_named = all(_NAME.fullmatch(name) for name in blocks)
    if not blocks or not is_named or len(set(blocks)) < len(blocks):
        raise ValueError(
            f"{setting}={tuple(blocks)}: give at least one name, each once, without its brackets "
            "(think, answer)."
        )


def share_of_tags(text: str, blocks: Sequence[str]) -> float:
    """Of the opening and closing tags of ``blocks`` the share that stands there exactly once."""
    tags = tags_of(blocks)
    return sum(text.count(tag) == 1 for tag in tags) / len(tags)


def has_form(text: str, blocks: Sequence[str], *, can_continue: bool = False) -> bool:
    """Whether ``text``, but for blanks around it, is exactly these blocks.

    Each tag stands there once and on a line of its own, the blocks follow each other in order, and
    none of them is blank.

    Args:
        text: A completion.
        blocks: Names of the tags.
        can_continue: Text may follow the last block.
    """
    text = text.strip()
    if share_of_tags(text, blocks) < 1:
        return False
    place = 0
    for number, name in enumerate(blocks):
        opening, closing = f"<{name}>\n", f"\n</{name}>"
        if number > 0:
            opening = f"\n{opening}"
        if not text.startswith(opening, place):
            return False
        start = place + len(opening)
        end = text.find(closing, start)
        if end < 0 or not text[start:end].strip():
            return False
        place = end + len(closing)
    return can_continue or place == len(text)


def only_block(text: str, name: str, *, outside: str) -> str | None:
    """What stands in the one block ``name`` of a text, stripped.

    None without such a block, with a second one or part of one, where it is blank, and where it
    lies inside a block ``outside`` or holds a tag of that.
    """
    opening, closing = tags_of((name,))
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    inner = text[start + len(opening) : end].strip()
    other_opening, other_closing = tags_of((outside,))
    if end < start or not inner or other_opening in inner or other_closing in inner:
        return None
    is_open_before = text.rfind(other_opening, 0, start) > text.rfind(other_closing, 0, start)
    next_opening, next_closing = text.find(other_opening, end), text.find(other_closing, end)
    is_closed_behind = next_closing >= 0 and not 0 <= next_opening < next_closing
    return None if is_open_before or is_closed_behind else inner
