"""Where the code of an answer is, and how it becomes a program."""

from __future__ import annotations

import re

MAX_CHARACTERS = 20_000
_FENCE = re.compile(r"^[ \t]*```[^\n]*$", re.MULTILINE)


def fenced(code: str) -> str:
    """``code`` in a block of Markdown."""
    return f"```python\n{code.rstrip()}\n```"


def extract_code(answer: str | None) -> str | None:
    """The code of an answer: its one fenced block, or all of it where there is no fence.

    None where there is nothing, too much, an unclosed fence (a truncated answer), or several
    blocks, so that several guesses are no answer.
    """
    if answer is None or len(answer) > MAX_CHARACTERS:
        return None
    fences = list(_FENCE.finditer(answer))
    if not fences:
        return answer if answer.strip() else None
    if len(fences) != 2:
        return None
    code = answer[fences[0].end() : fences[1].start()].strip("\n")
    return code if code.strip() else None


def functions_of(code: str) -> list[str]:
    """Names of the functions that code defines at its top level."""
    return re.findall(r"^def (\w+)", code, re.MULTILINE)


def before_function(code: str, function: str) -> str:
    """What stands above the definition of ``function``: imports and helpers."""
    found = re.search(rf"^def {re.escape(function)}\b", code, re.MULTILINE)
    return code[: found.start()] if found else ""


def defines(code: str, function: str) -> bool:
    """Whether a line of the code begins to define ``function``."""
    return re.search(rf"^(async )?def {re.escape(function)}\b", code, re.MULTILINE) is not None


def first_body(continuation: str) -> str:
    """The lines of a continuation that belong to the function it continues.

    A base model goes on after the function's end: the first line that is not indented ends it.
    """
    lines = continuation.split("\n")
    for number, line in enumerate(lines):
        if number > 0 and line and not line[0].isspace():
            return "\n".join(lines[:number])
    return continuation
