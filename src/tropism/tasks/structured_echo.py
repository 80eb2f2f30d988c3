"""Telling values that a model made up from words that it copied out of the prompt."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_TOKEN = re.compile(r"[^\W\d_]+|\d+")

_TYPES_AND_PLACEHOLDERS = (
    "string str text integer int number float decimal boolean bool true false null none nil na n "
    "nan undefined unknown value values placeholder example sample name todo tbd foo bar baz lorem "
    "ipsum xxx"
)
_AROUND_THEM = (  # "your name here", "insert the title of the book"
    "a an the of and or for to in is be my your its this that here insert enter some any"
)
FILLER_WORDS = frozenset(f"{_TYPES_AND_PLACEHOLDERS} {_AROUND_THEM}".split())


def words(text: str) -> list[str]:
    """``text`` as lower-case words and runs of digits; punctuation and ``_`` separate."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


def is_blank_or_echo(value: str, prompt: str) -> bool:
    """Whether ``value`` says nothing, or nothing that the prompt did not say already.

    True without any letter or digit ("", "...", "<>"), and where each word stands in the prompt or
    is a filler word: "title", "<string>", "Your name here", "the title of the book", "Title 1".
    Order does not matter. Digits alone are an answer ("1984").
    """
    tokens = words(value)
    letters = [token for token in tokens if not token.isdigit()]
    if not letters:
        return not tokens
    known = FILLER_WORDS.union(words(prompt))
    return all(token in known for token in letters)


def all_same(strings: Sequence[str]) -> bool:
    """Whether two or more strings are given and they are the same but for case and punctuation."""
    return len(strings) >= 2 and len({tuple(words(string)) for string in strings}) == 1


def has_repeats(strings: Sequence[str]) -> bool:
    """Whether two of the strings are the same but for case and punctuation."""
    return len({tuple(words(string)) for string in strings}) < len(strings)
