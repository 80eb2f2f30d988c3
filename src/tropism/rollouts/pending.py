"""Completions that are drawn in a thread of their own while the caller goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from tropism.types import GenerationProgress, Rollout

Found = TypeVar("Found")
Report = Callable[[GenerationProgress], None]


class CancelledError(Exception):
    """The completions are not wanted any more."""


class Pending(Generic[Found]):
    """A ``generate`` under way.

    Attributes:
        seconds: How long the drawing took; 0 as long as it goes on.

    Args:
        draw: Runs in the thread, and must touch nothing of the trainer's there. It is given what
            to call every few tokens, which raises ``CancelledError`` when it is to end.
        finish: Makes completions of what ``draw`` found; runs in the thread that asks for them.
    """

    def __init__(
        self, draw: Callable[[Report], Found], finish: Callable[[Found], list[Rollout]]
    ) -> None:
        self.seconds = 0.0
        self._finish = finish
        self._is_cancelled = threading.Event()
        self._rollouts: list[Rollout] | None = None
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tropism-rollout")
        self._future: Future[Found] = executor.submit(self._timed, draw)
        executor.shutdown(wait=False)

    def result(self) -> list[Rollout]:
        """The completions, once they are there; whatever ``draw`` raised."""
        if self._rollouts is None:
            self._rollouts = self._finish(self._future.result())
        return self._rollouts

    def wait(self) -> None:
        """Come back when the thread is done, whether well or not."""
        wait([self._future])

    @property
    def has_failed(self) -> bool:
        """Whether the thread is done and has nothing."""
        return self._future.done() and self._future.exception() is not None

    def cancel(self) -> None:
        """Have it end at the next few tokens, and wait for that."""
        self._is_cancelled.set()
        self.wait()

    def _timed(self, draw: Callable[[Report], Found]) -> Found:
        start = time.perf_counter()
        try:
            return draw(self._report)
        finally:
            self.seconds = time.perf_counter() - start

    def _report(self, progress: GenerationProgress) -> None:
        if self._is_cancelled.is_set():
            raise CancelledError
