"""Which option an answer chooses: by its letter, or by its text."""

from __future__ import annotations

import re

from tropism.tasks.math_writing import written

LETTERS = "ABCDEFGHIJ"
_SAID = re.compile(r"\banswer\**(?:[ \t]+is\b|[ \t]*:)[ \t:*]*(.*)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\W*(?:option\s+)?([A-J])\b(?:[).:\]]+|\s+[-–])?\W*(.*)", re.DOTALL)


def chosen_letter(text: str, choices: list[str]) -> int | None:
    """The one option that a text names by its letter; None where it names none, or several.

    A letter counts on a line of its own, behind "the answer is" or "Answer:", or in a box; alone,
    or with its own option's text behind it. "A or B" is none.
    """
    found = []
    for tail in (*_SAID.findall(text), *_BOXED.findall(text)):
        if letter := _LETTER.fullmatch(tail):
            found.append(_of_letter(letter, choices))
    for line in text.strip().splitlines():
        letter = _LETTER.fullmatch(line)
        if letter and (not letter[2] or _of_letter(letter, choices) is not None):
            found.append(_of_letter(letter, choices))
    return found[0] if len(set(found)) == 1 else None


def _of_letter(letter: re.Match[str], choices: list[str]) -> int | None:
    index, rest = LETTERS.index(letter[1]), _plain(letter[2])
    if index >= len(choices) or rest not in ("", _plain(choices[index])):
        return None
    return index


def chosen_text(text: str, choices: list[str]) -> int | None:
    """The option whose text a completion's only line is, but for punctuation.

    And but for case, where no two options differ in that alone, as genotypes do.
    """
    said = _SAID.findall(text)
    answer = said[0] if len(said) == 1 else text.strip()
    if "\n" in text.strip():
        return None
    for simplified in (_words, _plain):
        matches = [i for i, one in enumerate(choices) if simplified(one) == simplified(answer)]
        if matches:
            return matches[0] if len(matches) == 1 else None
    return None


def _words(text: str) -> str:
    return re.sub(r"[^\w+<>=%°/.-]+", " ", written(text)).strip(" .")


def _plain(text: str) -> str:
    return _words(text).casefold()
