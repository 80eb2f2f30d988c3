"""Replies of an enemy: whatever the bytes, they become literals or failures."""

from __future__ import annotations

import pytest

from tropism.sandbox import Failure, Job, Value
from tropism.sandbox.replies import frame, outcome

TWO = Job("", "f", ("()", "()"))
MISSING = Failure("missing")


def read(*payloads: bytes) -> tuple[Value | Failure, ...]:
    return outcome("done", b"".join(map(frame, payloads)), TWO).results


def test_values_and_failures() -> None:
    assert read(b"D", b"V[1, 'a']", b"EZeroDivisionError") == (
        Value([1, "a"]),
        Failure("ZeroDivisionError"),
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"V",
        b"X1",
        b"V__import__('os').system('true')",
        b"V[].append(1)",
        b"V(lambda: 1)()",
        b"V1 if 1 else 2",
        b"V" + b"[" * 60_000,
        b"V" + b"-" * 60_000 + b"1",
        b"V" + b"1+" * 30_000 + b"1j",
        b"V" + b"9" * 60_000,
        b"V{[]: 1}",
        b"V\xff\xfe",
        b"V'\\N{x}'",
        b"V\x00",
    ],
)
def test_no_value_but_a_literal(payload: bytes) -> None:
    first, second = read(b"D", payload, b"V2")
    assert isinstance(first, Failure)
    assert second == Value(2)


@pytest.mark.parametrize(
    ("reply", "is_defined", "results"),
    [
        (b"", False, (MISSING, MISSING)),
        (frame(b"V1") + frame(b"V2"), False, (MISSING, MISSING)),
        (frame(b"D"), True, (MISSING, MISSING)),
        (frame(b"D") + frame(b"V1")[:-1], True, (MISSING, MISSING)),
        (frame(b"D") + frame(b"V1") + b"\xff\xff\xff\xff", True, (Value(1), MISSING)),
        (b"".join(map(frame, (b"D", b"V1", b"V2", b"V3"))), True, (Value(1), Value(2))),
    ],
)
def test_what_is_short_is_missing_and_what_is_more_is_ignored(
    reply: bytes, is_defined: bool, results: tuple[Value | Failure, ...]
) -> None:
    found = outcome("done", reply, TWO)
    assert (found.is_defined, found.results) == (is_defined, results)
