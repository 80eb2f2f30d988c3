"""Which option an answer chooses: by its letter, or by its text.

What counts, for the second of four options, "a tundra":
    B                                also (B), **B.**, Option B, B. a tundra, "B because ..."
    The answer is B.                 also "Answer: B", \\boxed{B}; text may stand around it
    a tundra                         the option's text in place of its letter

All statements must agree. A list of all the options, copied from the question, is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tropism.tasks.math_writing import written

LETTERS = "ABCDEFGHIJ"
MAX_MARKS = 100
MAX_STATEMENT_CHARACTERS = 500
"""What is longer is no answer; with more marks a text repeats itself."""

_SAID = re.compile(
    r"\b(?:answer|choice|(?:correct|right|best)[ \t]+(?:option|letter))\**(?:[ \t]+is\b|[ \t]*:)"
    r"[ \t:*]*(?=(.{0,500}))",
    re.IGNORECASE,
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_LETTER = re.compile(r"\W*(?:(?i:option|choice|letter|answer)\s+\W*)?([A-J])\b(.*)", re.DOTALL)
_MAY_BE = re.compile(r".{0,20}\b[A-J]\b")  # spares most lines of a long text the rest
_MARKS = re.compile(r"^[\s).:\]>,;?!]*(?:[-–—]\s+)?")  # no sign: "A. -1"
_OTHER_LETTER = re.compile(r"\bA\b(?! [a-z])|\b[B-J]\b")
_IS_RIGHT = re.compile(
    r"\W+is (?:the )?(?:(?:correct|right|best)(?: (?:answer|option|choice|one))?|answer)\W*"
)
_REASON = re.compile(r"(?:^|,?\s+)(?:because|since)\b|,\s+(?:as|for|which)\b")
_SENTENCE_END = re.compile(r"\.\s")


def chosen_letter(text: str, choices: Sequence[str]) -> int | None:
    """The one option that a text chooses; None where it chooses none, or several.

    By its letter, on a line of its own, behind "the answer is" or "Answer:", or in a box: alone,
    with its own option's text behind it, or with a reason. Or by the option's text in the same
    places, where that line is the only one. "A or B" is none, nor is the "A" of "A dog".
    """
    found: list[int | None] = []
    marked = (*_SAID.findall(text), *_BOXED.findall(text))
    if len(marked) > MAX_MARKS:
        return None
    for statement in marked:
        found += _stated(statement, choices, is_marked=True)
    lines = [line for line in text.splitlines() if line.strip()]
    of_lines = [_stated(line, choices, is_marked=len(lines) == 1) for line in lines]
    found += _without_the_list(lines, of_lines, choices)
    return found[0] if len(set(found)) == 1 else None


def chosen_text(text: str, choices: Sequence[str]) -> int | None:
    """The option whose text a completion's only line is, but for punctuation.

    And but for case, where no two options differ in that alone, as genotypes do.
    """
    if "\n" in text.strip():
        return None
    said = _SAID.findall(text)
    return _option_of(said[0] if len(said) == 1 else text, choices)


def _without_the_list(
    lines: Sequence[str], stated: Sequence[list[int | None]], choices: Sequence[str]
) -> list[int | None]:
    """What lines state, but for the first copy of all the options with their letters."""
    copied: dict[int | None, int] = {}
    for number, (line, of_line) in enumerate(zip(lines, stated, strict=True)):
        if of_line and any(_plain(choices[i]) in _plain(line) for i in of_line if i is not None):
            copied.setdefault(of_line[0], number)
    skipped = set(copied.values()) if len(copied) == len(choices) else set()
    return [one for number, found in enumerate(stated) if number not in skipped for one in found]


def _stated(statement: str, choices: Sequence[str], *, is_marked: bool) -> list[int | None]:
    """The option that a statement names; ``[None]`` where it contradicts itself, [] for none.

    Args:
        is_marked: Something says that this is the answer, so that it may be the text of an option,
            and sentences may follow it.
    """
    if len(statement) > MAX_STATEMENT_CHARACTERS or not (is_marked or _MAY_BE.match(statement)):
        return []
    text = written(statement)
    letter = _LETTER.fullmatch(text)
    if letter and (index := LETTERS.index(letter[1])) < len(choices):
        allowed = ("", _plain(choices[index]))
        heads = _heads(letter[2], index, choices, is_marked)
        if _IS_RIGHT.fullmatch(letter[2]) or any(_behind(head) in allowed for head in heads):
            return [index]
    if not is_marked:
        return []
    by_text = {
        _option_of(head, choices)
        for i, choice in enumerate(choices)
        for head in _heads(text, i, choices, is_marked)
        if _plain(head) == _plain(choice)
    }
    if by_text:
        return [by_text.pop()] if len(by_text) == 1 else [None]
    is_article = letter is not None and letter[1] == "A" and letter[2][:2].lstrip().islower()
    return [None] if letter and not is_article else []


def _heads(text: str, index: int, choices: Sequence[str], is_marked: bool) -> Iterator[str]:
    """A text, and what of it stands before a reason, or before sentences that name no other one."""
    yield text
    others = tuple(_plain(choice) for i, choice in enumerate(choices) if i != index)
    if _behind(text) in others:
        return
    for end in _REASON.finditer(text):
        if not _plain(text[end.start() :]).startswith(others):
            yield text[: end.start()]
    for end in _SENTENCE_END.finditer(text) if is_marked else ():
        rest = text[end.end() :]
        names_another = set(_OTHER_LETTER.findall(rest)) - {LETTERS[index]}
        if not names_another and not _plain(rest).startswith(others):
            yield text[: end.start()]


def _behind(text: str) -> str:
    """What stands behind a letter, without the marks between them."""
    return _plain(_MARKS.sub("", text))


def _option_of(text: str, choices: Sequence[str]) -> int | None:
    for simplified in (_words, _plain):
        matches = [i for i, one in enumerate(choices) if simplified(one) == simplified(text)]
        if matches:
            return matches[0] if len(matches) == 1 else None
    return None


def _words(text: str) -> str:
    return re.sub(r"[^\w+<>=%°/.-]+", " ", written(text)).strip(" .")


def _plain(text: str) -> str:
    return _words(text).casefold()
