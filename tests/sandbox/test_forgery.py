"""Answers that make up their own verdict, which asserts run beside them believe."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tropism.sandbox import Failure, Job, Sandbox, Value
from tropism.sandbox.replies import frame
from tropism.tasks.code_tests import CodeTest

MISSING = Failure("missing")
ASSERT = "assert double(21) == 42"
TEST = CodeTest(("(21,)",), "_0 == 42")

WRITE = """
import os
def double(x):
    return 0
for fd in range(256):
    try:
        os.write(fd, MESSAGE)
    except OSError:
        pass
os._exit(0)
"""
FORGERIES = {
    # Writes the harness's own message to every file descriptor, and is gone.
    "message": WRITE.replace("MESSAGE", repr(b'{"ok": true}\n')),
    # The same in the form that the zygote sends.
    "frames": WRITE.replace("MESSAGE", repr(frame(b"D") + frame(b"VTrue"))),
    # Returns what equals everything.
    "equality": """
class Anything(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def double(x):
    return Anything(7)
""",
}

HARNESS = """
import json, sys
try:
    exec(sys.argv[1], names := {})
    exec(sys.argv[2], names)
    print(json.dumps({"ok": True}))
except BaseException:
    print(json.dumps({"ok": False}))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(num_slots=1)
    yield found
    found.close()


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery(name: str, sandbox: Sandbox) -> None:
    outcome = sandbox.run(Job(FORGERIES[name], "double", TEST.calls))
    (result,) = outcome.results
    assert result == {"message": MISSING, "frames": Value(True), "equality": Value(7)}[name]
    assert not (isinstance(result, Value) and TEST.holds([result.value]))
    honest = sandbox.run(Job("def double(x): return 2 * x", "double", TEST.calls))
    assert honest.results == (Value(42),)
    assert TEST.holds([42])


@pytest.mark.parametrize("name", ["message", "equality"])
def test_asserts_beside_the_answer_believe_it(name: str) -> None:
    command = [sys.executable, "-I", "-c", HARNESS, FORGERIES[name], ASSERT]
    done = subprocess.run(command, capture_output=True, check=False)
    assert b'{"ok": true}' in done.stdout


@pytest.mark.parametrize("name", ["frames", "equality"])
def test_statements_in_the_sandbox_believe_it_too(name: str, sandbox: Sandbox) -> None:
    """Which is why they are called forgeable, and why training never uses them."""
    outcome = sandbox.run(Job(FORGERIES[name], "double", statements=(ASSERT,)))
    assert isinstance(outcome.results[0], Value)


def test_a_job_sees_nothing_of_the_one_before(sandbox: Sandbox) -> None:
    write = "import builtins\nbuiltins.left = 1\ndef f():\n    open('left', 'w').write('x')\n"
    look = "import os, builtins\ndef f(): return os.listdir('.'), hasattr(builtins, 'left')"
    assert sandbox.run(Job(write, "f", ("()",))).results == (Value(None),)
    assert sandbox.run(Job(look, "f", ("()",))).results == (Value(([], False)),)


def test_only_literals_come_back(sandbox: Sandbox) -> None:
    code = """
from collections import Counter, OrderedDict, namedtuple
P = namedtuple("P", "x y")
VALUES = [
    Counter("aab"), OrderedDict(a=1), P(1, 2), frozenset({1}), set(), (), float("inf"), -0.0,
    1j, b"x", "\\ud800\\n'", [1, [2, (3,)]], {1: {2: None}}, True, object(), iter([]), f"{0}",
]
def f(i): return VALUES[i]
"""
    calls = tuple(f"({i},)" for i in range(17))
    found = [
        r.value if isinstance(r, Value) else r for r in sandbox.run(Job(code, "f", calls)).results
    ]
    assert found == [
        *({"a": 2, "b": 1}, {"a": 1}, (1, 2), {1}, set(), (), float("inf"), 0.0),
        *(1j, b"x", "\ud800\n'", [1, [2, (3,)]], {1: {2: None}}, True),
        *(Failure("TypeError"), Failure("TypeError"), "0"),
    ]
    assert type(found[0]) is dict
    assert found[13] is True


def test_no_test_file_is_left_behind(sandbox: Sandbox) -> None:
    slot = sandbox._slots[0]
    assert slot._scratch is not None
    folder = Path(slot._scratch)
    assert folder.exists()
    sandbox.close()
    assert not folder.exists()
