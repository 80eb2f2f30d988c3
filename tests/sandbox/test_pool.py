"""The pool: limits, order, threads, event loops, forks, and zygotes that die."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

from tropism.sandbox import Failure, Job, Limits, Sandbox, SandboxError, Value
from tropism.sandbox import slot as slots

DOUBLE = "def f(x): return 2 * x"
SLEEP = Job("import time\ndef f(): time.sleep(0.5)", "f", ("()",))
MISSING = Failure("missing")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(limits=Limits(cpu_seconds=1, wall_seconds=1.5), num_slots=2)
    found.run_many([SLEEP, SLEEP])  # both slots have started
    yield found
    found.close()


def jobs(num: int) -> list[Job]:
    return [Job(DOUBLE, "f", (f"({i},)",)) for i in range(num)]


def test_results_come_in_order(sandbox: Sandbox) -> None:
    uneven = "import time\ndef f(x):\n    time.sleep(0.05 * (x % 3 == 0))\n    return x"
    outcomes = sandbox.run_many([Job(uneven, "f", (f"({i},)",)) for i in range(9)])
    assert [outcome.results for outcome in outcomes] == [(Value(i),) for i in range(9)]


def test_slots_work_at_the_same_time(sandbox: Sandbox) -> None:
    start = time.monotonic()
    sandbox.run_many([SLEEP, SLEEP])
    both = time.monotonic() - start
    start = time.monotonic()
    sandbox.run(SLEEP)
    assert both < 1.7 * (time.monotonic() - start)


@pytest.mark.parametrize(
    ("code", "status", "results"),
    [
        ("import time\ndef f(x): time.sleep(x * 9); return x", "timeout", (Value(0), MISSING)),
        ("def f(x):\n    while x: pass\n    return x", None, (Value(0), MISSING)),
        ("def f(x): return 'x' * (x * 70_000)", "oversized", (Value(""), MISSING)),
        ("import os\ndef f(x): os._exit(0)", "done", (MISSING, MISSING)),
        ("def f(x): raise SystemExit", "done", (Failure("SystemExit"), Failure("SystemExit"))),
        ("def f(x): return f(x)", "done", (Failure("RecursionError"), Failure("RecursionError"))),
        ("def f(x): return [f] * x", "done", (Value([]), Failure("TypeError"))),
        ("x = 1\ndef f(y):\n    global x\n    x += 1\n    return x", "done", (Value(2), Value(3))),
        ("import ctypes\ndef f(x): return x and ctypes.string_at(0)", "done", (Value(0), MISSING)),
    ],
)
def test_limits(sandbox: Sandbox, code: str, status: str | None, results: tuple[object]) -> None:
    outcome = sandbox.run(Job(code, "f", ("(0,)", "(1,)")))
    assert outcome.is_defined
    assert outcome.results == results
    assert status in (outcome.status, None)  # a busy loop meets either limit of time


@pytest.mark.parametrize(
    "code",
    ["", "def g(): pass", "f = 3", "def f(:", "1 / 0", "def f(): pass\nraise SystemExit", "\x00"],
)
def test_code_that_does_not_run_defines_nothing(sandbox: Sandbox, code: str) -> None:
    outcome = sandbox.run(Job(code, "f", ("()",)))
    assert (outcome.is_defined, outcome.results) == (False, (MISSING,))


def test_a_verdict_can_be_had_again() -> None:
    code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd', 'e'})]"
    found = []
    for _ in range(2):
        sandbox = Sandbox(num_slots=1)
        found += [outcome.results for outcome in sandbox.run_many([Job(code, "f", ("()",))] * 2)]
        sandbox.close()
    assert found[1:] == found[:-1]


def test_many_threads_and_loops(sandbox: Sandbox) -> None:
    found: dict[int, list[Value | Failure]] = {}

    async def many(start: int) -> list[Value | Failure]:
        own = [Job(DOUBLE, "f", (f"({start + i},)",)) for i in range(5)]
        return [o.results[0] for o in await asyncio.gather(*map(sandbox.run_async, own))]

    def loop(start: int) -> None:
        found[start] = asyncio.run(many(start))

    threads = [threading.Thread(target=loop, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {100 * i: [Value(2 * (100 * i + j)) for j in range(5)] for i in range(3)}


def test_a_forked_process_has_zygotes_of_its_own(sandbox: Sandbox) -> None:
    sandbox.run_many([SLEEP, SLEEP])
    before = [slot._process.pid for slot in sandbox._slots if slot._process]
    child = os.fork()
    if child == 0:
        try:
            right = [o.results for o in sandbox.run_many(jobs(3))] == [
                (Value(2 * i),) for i in range(3)
            ]
            apart = not {s._process.pid for s in sandbox._slots if s._process} & set(before)
            sandbox.close()
        finally:
            os._exit(0 if right and apart else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [o.results for o in sandbox.run_many(jobs(3))] == [(Value(2 * i),) for i in range(3)]
    assert [slot._process.pid for slot in sandbox._slots if slot._process] == before


def test_a_zygote_that_dies_is_replaced(sandbox: Sandbox) -> None:
    sandbox.run_many(jobs(2))
    for slot in sandbox._slots:
        if slot._process is not None:
            slot._process.kill()
            slot._process.wait()
    assert [o.results for o in sandbox.run_many(jobs(4))] == [(Value(2 * i),) for i in range(4)]


def test_a_sandbox_that_fails_stops_the_run_with_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = Sandbox(num_slots=1)
    assert sandbox.mode
    broken = {**vars(sandbox._slots[0].limits), "open_files": "many"}
    monkeypatch.setattr(slots, "asdict", lambda part: broken if isinstance(part, Limits) else {})
    with pytest.raises(SandboxError, match=r"sandbox mode .*zygote ended"):
        sandbox.run(jobs(1)[0])
    sandbox.close()


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="memory_mb=0: give a positive limit"):
        Limits(memory_mb=0)
    with pytest.raises(ValueError, match="num_slots=0"):
        Sandbox(num_slots=0)
