"""Reading what the sandbox sent: bytes of an enemy, until proven a list of literals."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tropism.sandbox.settings import Failure, Job, Outcome, Status, Value

HEADER = 4
"""Bytes of a frame's length, big-endian."""


def frame(payload: bytes) -> bytes:
    """``payload`` behind its length."""
    return len(payload).to_bytes(HEADER) + payload


def outcome(status: Status, reply: bytes, job: Job) -> Outcome:
    """The outcome of ``job`` out of the frames that arrived.

    The first frame says that the function is defined. Each that follows is ``V`` with the literal
    of a value, or ``E`` with the name of an exception. What is malformed is missing, with all
    behind it.
    """
    frames = _frames(reply)
    is_defined = next(frames, None) == b"D"
    num_results = len(job.calls) or len(job.statements)
    results = [_result(payload) for payload, _ in zip(frames, range(num_results), strict=False)]
    results += [Failure("missing")] * (num_results - len(results))
    return Outcome(
        status, is_defined, tuple(results if is_defined else [Failure("missing")] * num_results)
    )


def _frames(reply: bytes) -> Iterator[bytes]:
    place = 0
    while place + HEADER <= len(reply):
        end = place + HEADER + int.from_bytes(reply[place : place + HEADER])
        if end > len(reply):
            return
        yield reply[place + HEADER : end]
        place = end


def _result(payload: bytes) -> Value | Failure:
    kind, text = payload[:1], payload[1:].decode("ascii", errors="replace")
    if kind != b"V":
        return Failure(text[:100] if kind == b"E" else "malformed")
    try:
        return Value(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return Failure("malformed")
