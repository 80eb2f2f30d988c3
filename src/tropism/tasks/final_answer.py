"""One final answer out of a completion, and whether two answers are the same."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

MAX_ANSWER_CHARACTERS = 2_000
_MARKER = re.compile(r"^[ \t]*answer:", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def extract_answer(completion: str, *, can_span_lines: bool = False) -> str | None:
    """What follows the only ``Answer:`` line-start of a completion, up to its end.

    None without such a line, with several, with nothing behind it, or with further lines behind
    it (unless ``can_span_lines``, for grids).
    """
    markers = list(_MARKER.finditer(completion))
    if len(markers) != 1:
        return None
    return one_answer(completion[markers[0].end() :], can_span_lines=can_span_lines)


def one_answer(text: str, *, can_span_lines: bool = False) -> str | None:
    """``text``, stripped; None where it is blank, very long, or has lines that it may not have."""
    answer = text.strip()
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    return answer if can_span_lines or "\n" not in answer else None


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers are the same but for case, spacing, markdown emphasis and a final stop.

    Plain numbers are compared by value, thousands separators allowed ("1,000", "1000.0"). Units,
    words around the answer and alternatives ("41 or 42") make it another answer.
    """
    answer, gold = _normalised(answer), _normalised(gold)
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(gold):
        return Decimal(answer.replace(",", "")) == Decimal(gold.replace(",", ""))
    return answer == gold


def _normalised(answer: str) -> str:
    text = unicodedata.normalize("NFKC", answer).casefold().strip()
    for mark in ("**", "`", '"'):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)]
    text = text.removesuffix(".")
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())
