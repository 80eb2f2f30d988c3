"""A pool of sandboxed interpreters, for any thread, event loop and forked process."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from tropism.sandbox.probe import choose
from tropism.sandbox.settings import Job, Limits, Mode, Outcome, Setting
from tropism.sandbox.slot import Layers, Slot, interpreter

MAX_SLOTS = 16


class Sandbox:
    """Runs model-written code, many jobs at a time.

    Nothing is started before the first job, or before ``mode`` is asked for.

    Args:
        setting: ``auto`` takes the strongest mode that this machine offers and refuses to do
            without; ``rlimits`` also accepts resource limits alone, with a warning.
        limits: What one job may use.
        num_slots: Jobs that run at the same time; as many as there are processors, up to
            ``MAX_SLOTS``, where null. A slot starts when the others are busy.
        python: Interpreter that runs the jobs; the one that runs this where null.
        layers: Confine by these instead of the strongest ones (for tests).
    """

    def __init__(
        self,
        setting: Setting = "auto",
        limits: Limits | None = None,
        *,
        num_slots: int | None = None,
        python: str | None = None,
        layers: Layers | None = None,
    ) -> None:
        if setting not in ("auto", "rlimits"):
            raise ValueError(f"sandbox={setting!r}: choose 'auto' or 'rlimits'.")
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"num_slots={num_slots}: give at least 1, or null.")
        self.setting: Setting = setting
        self.limits = Limits() if limits is None else limits
        self.num_slots = num_slots or min(os.cpu_count() or 1, MAX_SLOTS)
        self.python = python or interpreter()
        self._layers = layers
        self._slots: list[Slot] = []
        self._reset()
        weakref.finalize(self, _close, self._slots)
        _EVERY.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()
        self._slots.clear()
        self._executor: ThreadPoolExecutor | None = None

    @property
    def mode(self) -> Mode:
        """What confines the jobs: found out by the probe, and worth a place in a run's record.

        Raises:
            SandboxError: No sandbox that holds can be had here.
        """
        self._open()
        assert self._layers is not None
        return self._layers.mode

    def run(self, job: Job) -> Outcome:
        """Run ``job``; waits for a free slot. Safe from any thread.

        Raises:
            SandboxError: No sandbox can be had, or it failed twice.
        """
        self._open()
        slot = self._free.get()
        try:
            return slot.run(job)
        finally:
            self._free.put(slot)

    def run_many(self, jobs: Iterable[Job]) -> list[Outcome]:
        """The outcomes of ``jobs``, in order, as many at a time as there are slots."""
        return list(self._open().map(self.run, jobs))

    async def run_async(self, job: Job) -> Outcome:
        """``run`` for coroutines of any event loop."""
        return await asyncio.wrap_future(self._open().submit(self.run, job))

    def close(self) -> None:
        """End all zygotes; the next job starts new ones."""
        executor = self._executor
        if executor is not None:
            executor.shutdown()
        _close(self._slots)
        self._reset()

    def _open(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._layers = self._layers or choose(self.setting, self.python)
                self._executor = ThreadPoolExecutor(self.num_slots, "sandbox")
                for number in range(self.num_slots):
                    self._slots.append(Slot(self._layers, self.limits, number, self.python))
                    self._free.put(self._slots[-1])
            return self._executor

    def _abandon(self) -> None:
        for slot in self._slots:
            slot.abandon()
        self._reset()


_EVERY: weakref.WeakSet[Sandbox] = weakref.WeakSet()


@cache
def shared(setting: Setting = "auto", limits: Limits | None = None) -> Sandbox:
    """The process's one sandbox of these settings."""
    return Sandbox(setting, limits)


def _abandon_all() -> None:
    for sandbox in list(_EVERY):
        sandbox._abandon()


def _close(slots: list[Slot]) -> None:
    for slot in slots:
        slot.close()


# A forked process (a data loader's worker, say) shares no zygote with its parent: it starts others.
os.register_at_fork(after_in_child=_abandon_all)
