"""Asks a server over HTTP, and waits where it is away; knows nothing of what is asked.

1. Asked again, with pauses that double: no connection, one that broke or timed out, and answers
   of 5xx. What is drawn is keyed by its seed, so that asking twice changes nothing.
2. A refusal (4xx) is final: the same request would be refused again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any

import httpx
from lightning.pytorch.utilities import rank_zero_warn

from tropism.rollouts.engine import EngineUnreachableError

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between two tries; each pause is twice the one before."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM itself looks for its key; a config would end up in the run folder."""


class RefusedError(RuntimeError):
    """The server answered, and said no.

    Attributes:
        status: HTTP's.
        reason: What the server said.
        is_unknown_route: Whether it has nothing at all at that path.
    """

    def __init__(self, path: str, status: int, reason: str, *, is_unknown_route: bool) -> None:
        super().__init__(f"the server refused {path} with HTTP {status}: {reason}")
        self.status, self.reason, self.is_unknown_route = status, reason, is_unknown_route


class ServerClient:
    """Connections to one server; an asynchronous context, used within one event loop.

    Args:
        url: ``http://HOST:PORT``.
        request_seconds: Longest wait for one answer.
        wait_seconds: How long the server may be away before the run stops.
    """

    def __init__(self, url: str, *, request_seconds: float, wait_seconds: float) -> None:
        self.url, self.wait_seconds = url, wait_seconds
        self._is_away = False
        key = os.environ.get(KEY_VARIABLE)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(request_seconds, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=256),
            trust_env=False,  # proxies are for the outside world
        )

    async def __aenter__(self) -> ServerClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def get(self, path: str) -> httpx.Response:
        """The answer to a GET.

        Raises:
            RefusedError: It is a 4xx.
            EngineUnreachableError: The server was away for ``wait_seconds``.
        """
        return await self._ask("GET", path, None, lambda response: None)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        unfinished: Callable[[httpx.Response], str | None] = lambda response: None,
        is_500_final: bool = False,
    ) -> httpx.Response:
        """The answer to a POST of JSON.

        Args:
            path: On the server.
            body: What is sent.
            unfinished: Says why an answer is none yet; None where it is one.
            is_500_final: Whether a server that is well otherwise means its 500 as a refusal.

        Raises:
            RefusedError: It is a 4xx.
            EngineUnreachableError: The server was away for ``wait_seconds``.
        """
        return await self._ask("POST", path, body, unfinished, is_500_final=is_500_final)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        unfinished: Callable[[httpx.Response], str | None],
        *,
        is_500_final: bool = False,
    ) -> httpx.Response:
        pause, until = FIRST_PAUSE, None
        while True:
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                reason: str | None = f"{type(error).__name__} {error}".strip()
            else:
                reason = unfinished(response) if response.is_success else _said(response)
                is_final = response.is_client_error
                if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR and is_500_final:
                    is_final = await self._is_healthy()
                if is_final:
                    raise RefusedError(
                        path,
                        response.status_code,
                        reason or "",
                        is_unknown_route="detail" in _json(response),
                    )
                if reason is None:
                    self._is_away = False
                    return response
            now = time.monotonic()
            until = now + self.wait_seconds if until is None else until
            if now >= until:
                raise EngineUnreachableError(
                    f"engine.url={self.url}: the server has been away for "
                    f"{self.wait_seconds:g} s ({path}: {reason}). Start it again, then resume the "
                    "run from its last checkpoint; or let runs wait longer by engine.wait_seconds."
                )
            self._say_once(reason)
            await asyncio.sleep(min(pause, until - now))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health")).is_success
        except httpx.TransportError:
            return False

    def _say_once(self, reason: str | None) -> None:
        if not self._is_away:
            self._is_away = True
            rank_zero_warn(
                f"engine.url={self.url}: the server does not answer ({reason}); the run waits for "
                f"it, up to {self.wait_seconds:g} s."
            )


def _json(response: httpx.Response) -> dict[str, Any]:
    """The object that an answer holds; empty where it is anything else."""
    if not response.headers.get("content-type", "").startswith("application/json"):
        return {}
    content = response.json()
    return content if isinstance(content, dict) else {}


def _said(response: httpx.Response) -> str:
    """What an answer that is none has to say."""
    error = _json(response).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"HTTP {response.status_code} {message or response.text[:200]}".strip()
