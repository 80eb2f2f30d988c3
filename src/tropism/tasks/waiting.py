"""Asynchronous verdicts, awaited many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CONCURRENT = 64
"""Verdicts that are awaited at the same time."""


def wait_for(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results in order, exceptions in their place."""

    async def gather() -> list[Any]:
        places = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(awaitable: Awaitable[Any]) -> Any:
            async with places:
                return await awaitable

        return await asyncio.gather(*map(one, awaitables), return_exceptions=True)

    return run(gather()) if awaitables else []


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, also where a loop is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none is running
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as elsewhere:  # inside a notebook's loop
        return elsewhere.submit(asyncio.run, coroutine).result()
