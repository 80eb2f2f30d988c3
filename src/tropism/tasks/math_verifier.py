"""math-verify in processes of their own, with a deadline that holds.

math-verify sets alarms, which work in a main thread only, and its time-outs do not stop sympy
inside C code. Workers are interpreters started anew, and not ``multiprocessing``'s: that would load
the trainer's main module, torch included, into each of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
from concurrent.futures import Future
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from tropism.tasks import math_worker
from tropism.tasks.math_worker import NO, READY, YES

DEADLINE_SECONDS = 3.0
NUM_WORKERS = 2
START_SECONDS = 120.0
MAX_VERDICTS_KEPT = 10_000

log = logging.getLogger(__name__)


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self, deadline: float) -> None:
        # -P: its folder has a `math.py`, which must not take the place of Python's.
        command = [sys.executable, "-P", str(Path(math_worker.__file__)), str(deadline)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        # A worker that sleeps would not meet its deadline, which is in CPU seconds.
        self.patience = 10 * deadline + 10
        self.is_ready = False

    def ask(self, gold: str, answer: str) -> bool | None:
        """Whether they are the same; None where the worker did not survive the question.

        Raises:
            RuntimeError: It never started.
        """
        if not self.is_ready:
            if self._reply(START_SECONDS) != READY:
                raise RuntimeError(
                    "the process for math-verify did not start: see what `python -c 'import "
                    f"math_verify'` says in {sys.executable}."
                )
            self.is_ready = True
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        reply = self._reply(self.patience)
        return reply == YES if reply in (YES, NO) else None

    def _reply(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            return os.read(descriptor, 1) if selector.select(seconds) else b""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was to be flushed has no reader
                pipe.close()


class MathVerifier:
    """Compares answers by math-verify, in a few processes that start with the first question.

    Safe to be called from several threads at once. A question that runs past the deadline, or that
    ends its process, is answered with False and counted; another process takes the place.

    Args:
        deadline: CPU seconds for one comparison.
        num_workers: Processes.

    Attributes:
        num_lost: Comparisons that ended their process.
    """

    def __init__(
        self, *, deadline: float = DEADLINE_SECONDS, num_workers: int = NUM_WORKERS
    ) -> None:
        self.deadline = deadline
        self.num_lost = 0
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._verdicts: dict[tuple[str, str], Future[bool]] = {}
        self._owner = os.getpid()
        atexit.register(self.close)

    def same(self, gold: str, answer: str) -> bool:
        """Whether ``answer`` (LaTeX) is mathematically the same as ``gold``; asked once each.

        Raises:
            RuntimeError: math-verify cannot be run.
        """
        with self._lock:
            verdict = self._verdicts.get((gold, answer))
            is_mine = verdict is None
            if verdict is None:
                if len(self._verdicts) >= MAX_VERDICTS_KEPT:
                    del self._verdicts[next(iter(self._verdicts))]
                verdict = self._verdicts[gold, answer] = Future()
        if is_mine:
            try:
                verdict.set_result(self._ask(gold, answer))
            except RuntimeError as error:
                verdict.set_exception(error)
        return verdict.result()

    async def same_later(self, gold: str, answer: str) -> bool:
        """``same`` without blocking the loop."""
        return await asyncio.to_thread(self.same, gold, answer)

    def _ask(self, gold: str, answer: str) -> bool:
        worker = self._idle.get() or self._start()
        try:
            is_same = worker.ask(gold, answer)
        except RuntimeError:
            self._end(worker)
            self._idle.put(None)
            raise
        if is_same is None:
            self._end(worker)
            with self._lock:
                self.num_lost += 1
            log.warning("math-verify was stopped at %.100r, compared with %.100r.", answer, gold)
            worker = self._start()  # at the end of the queue: it loads while others work
        self._idle.put(worker)
        return bool(is_same)

    def _start(self) -> _Worker:
        worker = _Worker(self.deadline)
        with self._lock:
            self._workers.add(worker)
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._workers.discard(worker)

    def close(self) -> None:
        """End all processes; those of a parent are left alone in a fork of it."""
        if os.getpid() == self._owner:
            for worker in list(self._workers):
                self._end(worker)


def shared_verifier() -> MathVerifier:
    """The one of this process, so that all tasks use the same few workers."""
    return _verifier_of(os.getpid())


@lru_cache(maxsize=1)
def _verifier_of(process: int) -> MathVerifier:
    return MathVerifier()


def check_installed() -> None:
    """Raise ValueError where math-verify is missing."""
    if find_spec("math_verify") is None:
        raise ValueError(
            "math-verify, which compares the answers, is not installed: pip install math-verify."
        )
