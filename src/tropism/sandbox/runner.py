"""What a confined process does: runs the answer, calls its function, and writes the results out.

Loaded by ``zygote.py``, so it has nothing but the standard library.
"""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 50


def send(fd: int, payload: bytes) -> None:
    data = memoryview(len(payload).to_bytes(4, "big") + payload)
    while data:
        data = data[os.write(fd, data) :]


def literal(value: Any, depth: int = 0) -> str:
    """``value`` in the types that ``ast.literal_eval`` reads; a subclass as its base."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or value is True or value is False:
        return repr(value)
    if isinstance(value, float):
        text = float.__repr__(value)  # "nan" is no literal and stays none: it equals nothing
        return {"inf": "1e999", "-inf": "-1e999"}.get(text, text)
    if isinstance(value, (int, complex, bytes)):
        kind = next(kind for kind in (int, complex, bytes) if isinstance(value, kind))
        return kind.__repr__(value)
    if isinstance(value, str):
        return ascii(str.__str__(value))
    if isinstance(value, dict):
        pairs = [f"{literal(k, depth + 1)}:{literal(v, depth + 1)}" for k, v in dict.items(value)]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = ",".join([literal(part, depth + 1) for part in value])
        if isinstance(value, list):
            return f"[{parts}]"
        if isinstance(value, tuple):
            return f"({parts},)" if parts else "()"
        return f"{{{parts}}}" if parts else "set()"
    raise TypeError(type(value).__name__)


def attempt(fd: int, work: Callable[[], Any]) -> None:
    """Send what ``work`` returns, or the name of what it raises (exits and interrupts too)."""
    try:
        reply = b"V" + literal(work()).encode("ascii")
    except BaseException as error:
        reply = b"E" + type(error).__name__.encode("ascii", "replace")[:100]
    send(fd, reply)


def run_job(job: dict[str, Any], fd: int) -> None:
    """Send ``D`` once the function is defined, then one frame for each call or statement."""
    random.seed(0)  # a verdict can be had again
    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(job["code"], "<answer>", "exec", dont_inherit=True), names)
        is_defined = callable(names.get(job["function"]))
    except BaseException:
        return
    if not is_defined:
        return
    send(fd, b"D")
    for call in job["calls"]:
        attempt(fd, lambda: names[job["function"]](*ast.literal_eval(call)))  # noqa: B023
    for statement in job["statements"]:
        attempt(fd, lambda: exec(compile(statement, "<test>", "exec", dont_inherit=True), names))  # noqa: B023
