r"""The one final answer in a solution, and what makes an answer more than one.

Where it is looked for, all at once:
    \boxed{42}          the last one, and those beside it ("\boxed{41} or \boxed{42}")
    #### 42             as GSM8K writes it; headings that are no numbers do not count
    The answer is 42.   also "Answer: 42", and alone on the last line, below "Answer:" or "####"
    42                  the whole text, where it is one short line without any of these

Where they disagree there is no answer: one that names several would be right by guessing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tropism.tasks.math_writing import (
    MAX_ANSWER_CHARACTERS,
    PERCENT,
    number_of,
    written,
    written_alike,
)

MAX_MARKS = 100
"""A text with more of them repeats itself, and is not worth the time."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BESIDE = re.compile(
    r"[^A-Za-z0-9]*(?:(?:\\text\{\s*)?(?:or|and)(?:\s*\})?)?[^A-Za-z0-9]*", re.IGNORECASE
)
_HASHES = re.compile(r"####[ \t]*(.+)")
# Looked ahead at, so that a sentence behind it on the same line is found too.
_SAID = re.compile(r"\banswer\**(?:[ \t]+is\b|[ \t]*:)[ \t:*]*(?=(.{0,500}))", re.IGNORECASE)
_ASKED_FOR = re.compile(r"(?:\banswer\**(?:[ \t]+is)?[ \t:*]*|####[ \t]*)\s*\Z", re.IGNORECASE)
_DISPLAYED = re.compile(r"\\\[\s+|\s+\\\]")  # \[ and \] on lines of their own
# "The answer is 6, since 2 * 3 = 6": what is behind the answer is no part of it.
_SENTENCE_END = re.compile(r"\.(?=\s|\*|$)|,?\s+(?:because|since)\b|,\s+(?:as|for|so|which)\b")
_STARTS_LIKE_MATHS = re.compile(r"[-+−$€£\\(\[{.\d]|[A-Za-z]\s*=")

_ASKS_PERCENT = re.compile(
    r"\b(?:what|which|how|find|calculate|compute|determine)\b[^.?!]*\bpercent", re.IGNORECASE
)
_ALTERNATIVES = re.compile(r"\bor\b|\band\b|\\pm|\\mp|±|;", re.IGNORECASE)
_DIGITS_APART = re.compile(r"\d\s+[\d.]")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_CALCULATION = re.compile(
    r"(?=.*\d)(?:[\d\s.+\-*/^(){}!,]|\\(?:frac|sqrt|cdot|times|div|pi)(?![A-Za-z]))+"
)


def final_answer(text: str) -> str | None:
    """The one final answer of a text as it is written there; None without one, or with several."""
    if max(text.count("####"), text.lower().count("answer")) > MAX_MARKS:
        return None
    boxes = _last_boxes(text)
    hashes = [tail for tail in _HASHES.findall(text) if _is_number(tail)]
    said = [
        tail
        for found in _SAID.findall(text)
        if (tail := _SENTENCE_END.split(found, maxsplit=1)[0].strip()) and "\\boxed" not in tail
    ]
    head, _, last = _DISPLAYED.sub(" ", text.strip()).rpartition("\n")
    if _ASKED_FOR.search(head[-100:]) and "\\boxed" not in last:
        said.append(last.strip())
    marked = [*boxes, *hashes]
    if marked:  # "We check our answer: $17 * 44 = ...$" says nothing against them
        answers = [*marked, *filter(_is_number, said)]
    else:
        answers = [tail for tail in said if _STARTS_LIKE_MATHS.match(tail)] or said
    if not answers and not (_SAID.search(text) or "####" in text or "\\boxed" in text):
        whole = text.strip()
        answers = [whole] if whole and "\n" not in whole else []
    if not answers or any(len(answer) > MAX_ANSWER_CHARACTERS for answer in answers):
        return None
    return answers[0] if all(written_alike(answers[0], other) for other in answers[1:]) else None


def _is_number(text: str) -> bool:
    return number_of(text, can_be_percent=True) is not None


def _last_boxes(text: str) -> list[str]:
    """What is in the last box, and in those before it with nothing but an "or" between."""
    boxes: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int] | None] = []  # of a box where it begins, and its content
    outermost = 0
    for brace in _BRACES.finditer(text):
        if brace[0].startswith(("\\boxed", "\\fbox")):
            opened.append((brace.start(), brace.end()))
            outermost += 1
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened and (box := opened.pop()) is not None:
            outermost -= 1
            if outermost == 0:
                boxes.append((box[0], brace.end(), text[box[1] : brace.start()].strip()))
    last: list[str] = []
    follows = len(text)
    for start, end, content in reversed(boxes):
        if last and not _BESIDE.fullmatch(text[end:follows]):
            break
        follows = start
        if content:
            last.append(content)
    return last


def asks_percent(question: str) -> bool:
    """Whether the answer is to be a percentage, so that "12%" and "12" say the same."""
    return _ASKS_PERCENT.search(question) is not None


def claims_more(answer: str, gold: str, *, can_be_percent: bool = False) -> bool:
    """Whether an answer names several values, or a percentage, where the right one does not.

    math-verify takes "41 or 42", "1 2 3 42" and "12%" for 42 and 12.
    """
    mine, right = written(answer), written(gold)
    if not can_be_percent and PERCENT.search(mine) and not PERCENT.search(right):
        return True
    if number_of(answer, can_be_percent=True) is not None:  # "3 1/2" is one
        return False
    if _DIGITS_APART.search(mine) and not _DIGITS_APART.search(right):
        return True
    if _ALTERNATIVES.search(right) or "," in right:
        return False
    return _ALTERNATIVES.search(mine) is not None or _has_comma_outside(mine)


def calculations(answer: str, gold: str) -> list[str]:
    """What an answer computes before it says what that is: "2 \\cdot 4" of "2 \\cdot 4 = 6".

    math-verify looks at the last side of an equation alone. Quantities ("x", "f(2)") are none, and
    nothing is where the right answer is itself an equation.
    """
    if _EQUALS.search(gold):
        return []
    *sides, _ = _EQUALS.split(written(answer))
    return [side.strip() for side in sides if _CALCULATION.fullmatch(side)]


def _has_comma_outside(latex: str) -> bool:
    depth = 0
    for character in latex.replace("\\{", "").replace("\\}", ""):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            return True
    return False


def last_number(text: str) -> str:
    """The last number of a text, for a baseline; "0" without one."""
    numbers: Sequence[str] = re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].rstrip(",") if numbers else "0"
