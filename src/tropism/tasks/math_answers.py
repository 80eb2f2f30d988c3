r"""The one final answer in a solution, and what makes an answer more than one.

Where it is looked for, all at once:
    \boxed{42}          the last one, and those beside it ("\boxed{41} or \boxed{42}")
    #### 42             as GSM8K writes it; headings that are no numbers do not count
    The answer is 42.   also "Answer: 42"
    42                  the whole text, where it is one short line without any of these

Where they disagree there is no answer: one that names several would be right by guessing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

MAX_ANSWER_CHARACTERS = 500
MAX_MARKS = 100
"""A text with more of them repeats itself, and is not worth the time."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BESIDE = re.compile(
    r"[^A-Za-z0-9]*(?:(?:\\text\{\s*)?(?:or|and)(?:\s*\})?)?[^A-Za-z0-9]*", re.IGNORECASE
)
_HASHES = re.compile(r"####[ \t]*(.+)")
# Looked ahead at, so that a sentence behind it on the same line is found too.
_SAID = re.compile(r"\banswer\**(?:[ \t]+is\b|[ \t]*:)[ \t:*]*(?=(.{0,500}))", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|\*|$)")
_STARTS_LIKE_MATHS = re.compile(r"[-+−$€£\\(\[{.\d]|[A-Za-z]\s*=")

_SPACES = re.compile(r"\\[,;: ]|~|\s+")
_WRITING = (
    (re.compile(r",\\!\s*"), ","),  # 10,\!080
    (re.compile(r"\\!|\\left\b|\\right\b|\\displaystyle\b|\*\*|`"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"−|–(?=\d)"), "-"),
    (re.compile(r"\\[()\[\]]"), ""),
    (re.compile(r"\\(?:boxed|fbox)\b"), ""),
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)[$€£]?\s*(?P<inner>-?)(?P<value>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<unit>.*)",
    re.DOTALL,
)
_UNIT = re.compile(r"[a-z]+\.?(?:\^?\{?[23]\}?|[²³])?|/|°|\^\{?\\circ\}?", re.IGNORECASE)
_NO_UNITS = {
    *(
        "or",
        "and",
        "not",
        "to",
        "if",
        "is",
        "than",
        "more",
        "less",
        "over",
        "plus",
        "minus",
        "times",
    ),
    *("x", "k", "half", "hundred", "thousand", "million", "billion", "dozen", "percent"),
}
_PERCENT = re.compile(r"\\?%|\bpercent\b", re.IGNORECASE)
_ASKS_PERCENT = re.compile(
    r"\b(?:what|which|how|find|calculate|compute|determine)\b[^.?!]*\bpercent", re.IGNORECASE
)
_ALTERNATIVES = re.compile(r"\bor\b|\band\b|\\pm|\\mp|±|;", re.IGNORECASE)
_DIGITS_APART = re.compile(r"\d\s+[\d.]")


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


def written(latex: str) -> str:
    """An answer without what changes its look alone: delimiters, spacing, ``\\left``, a stop."""
    for pattern, replacement in _WRITING:
        latex = pattern.sub(replacement, latex)
    latex = _TEXT.sub(r" \1 ", latex)
    latex = _SPACES.sub(" ", latex).strip()
    latex = latex.removesuffix(".").removeprefix("$").removesuffix("$").strip()
    return _THOUSANDS.sub("", latex)


def written_alike(one: str, other: str) -> bool:
    """Whether two answers are the same number, or the same text but for their look."""
    first, second = number_of(one, can_be_percent=True), number_of(other, can_be_percent=True)
    if first is not None and second is not None:
        return first == second
    return _bare(one) == _bare(other)


def _bare(latex: str) -> str:
    # Digits that stand apart stay so: "1 2" is not 12.
    return re.sub(r"(?<!\d) | (?!\d)", "", written(latex))


def number_of(text: str, *, can_be_percent: bool = False) -> Decimal | None:
    """The value of a text that is one plain number: "42", "$1,000.50", "18 eggs", "-3.0".

    None for anything else: two numbers, a formula, "5 hundred"; and "12%", which is not 12, unless
    ``can_be_percent``.
    """
    found = _NUMBER.fullmatch(written(text).replace("\\$", "$").strip("$ "))
    if found is None or (found["sign"] and found["inner"]):
        return None
    unit = found["unit"].strip().removesuffix(".")
    if can_be_percent:
        unit = _PERCENT.sub("", unit).strip()
    words = unit.replace("/", " / ").replace(" ^", "^").split()
    if len(words) > 5 or not all(_UNIT.fullmatch(word) for word in words):
        return None
    if any(word.casefold() in _NO_UNITS for word in words):
        return None
    sign = -1 if "-" in (found["sign"], found["inner"]) else 1
    return sign * Decimal(found["value"].replace(",", ""))


def asks_percent(question: str) -> bool:
    """Whether the answer is to be a percentage, so that "12%" and "12" say the same."""
    return _ASKS_PERCENT.search(question) is not None


def claims_more(answer: str, gold: str, *, can_be_percent: bool = False) -> bool:
    """Whether an answer names several values, or a percentage, where the right one does not.

    math-verify takes "41 or 42", "1 2 3 42" and "12%" for 42 and 12.
    """
    mine, right = written(answer), written(gold)
    if not can_be_percent and _PERCENT.search(mine) and not _PERCENT.search(right):
        return True
    if _DIGITS_APART.search(mine) and not _DIGITS_APART.search(right):
        return True
    if _ALTERNATIVES.search(right) or "," in right:
        return False
    return _ALTERNATIVES.search(mine) is not None or _has_comma_outside(mine)


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
