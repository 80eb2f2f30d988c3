"""Samples with a ``vllm serve`` on other GPUs or another machine, over HTTP; needs no vLLM here.

How it keeps to the trainer's policy:
1. prompts are encoded and completions decoded here; the server sees token ids alone;
2. every completion has a seed of its own, keyed by (seed, rollout, prompt, sample): what has to be
   asked for again comes back the same;
3. the server holds the base, and is sent the adapter whenever that has moved, under a new name;
   ``server_proof`` has it prove at the start that its base is the trainer's, and each time that it
   computes with the adapter;
4. with ``begin`` it draws in a thread, from the adapter of then, while the trainer goes on;
5. where the server is away the run waits for it; one that was started anew meanwhile is proved and
   sent everything again.

    engine:
      class_path: tropism.rollouts.vllm_server_engine.VLLMServerEngine
      init_args: {url: "http://127.0.0.1:8000"}
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from tropism.measurements import metrics as names
from tropism.policy import Policy
from tropism.rollouts.engine import Sampling
from tropism.rollouts.pending import Pending, Report
from tropism.rollouts.requests import Answer, Request, requests_for, rollouts_of
from tropism.rollouts.server_client import RefusedError, ServerClient
from tropism.rollouts.server_delivery import ServerDelivery
from tropism.rollouts.server_proof import Proof
from tropism.rollouts.server_protocol import cache_and_queue, complete, counters, served_model
from tropism.rollouts.transformers_engine import check_context
from tropism.tasks.waiting import run
from tropism.types import GenerationProgress, Prompt, Rollout

MAX_RESTARTS = 3
"""Of the server within one ``generate``, before the run stops."""
LOOK_UP_SECONDS = 0.2
"""How often a thread that draws looks whether it should go on."""


class Ready(NamedTuple):
    """A server that has what is needed.

    Args:
        name: By which to ask it.
        sent: Metrics of what it was sent for that.
        counters: What it has counted so far.
    """

    name: str
    sent: dict[str, float]
    counters: dict[str, float]


class VLLMServerEngine:
    """A vLLM server elsewhere.

    Args:
        url: ``http://HOST:PORT``. A key is taken from the environment (``VLLM_API_KEY``).
        model: By which name the server must serve the base; its first name where null.
        max_sampler_gap: Largest mean gap to the trainer's log-probabilities, nats a token, before
            the run stops; null for no limit.
        adapter_folder: Where adapters are written for the server; a folder that both see under one
            name where it runs on another machine. Null: the place for temporary files.
        wait_seconds: How long the server may be away before the run stops.
        request_seconds: Longest wait for one prompt's completions.

    Raises:
        ValueError: Settings that cannot work.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        model: str | None = None,
        max_sampler_gap: float | None = 0.2,
        adapter_folder: str | None = None,
        wait_seconds: float = 300.0,
        request_seconds: float = 600.0,
    ) -> None:
        _check_settings(url, max_sampler_gap, wait_seconds, request_seconds)
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        self.max_sampler_gap = max_sampler_gap
        self.adapter_folder = adapter_folder
        self.wait_seconds, self.request_seconds = wait_seconds, request_seconds
        self._policy: Policy | None = None
        self._delivery: ServerDelivery | None = None
        self._proof: Proof | None = None
        self._metrics: dict[str, float] = {}
        self._pending: Pending[Any] | None = None

    def bind(self, policy: Policy) -> None:
        """Take the policy; the first ``generate`` looks at the server.

        Raises:
            ValueError: A policy without adapters, or a folder for them that is missing.
        """
        if not policy.uses_lora:
            raise ValueError(
                "engine: VLLMServerEngine sends adapters, and `lora: null` trains all weights. "
                "Set lora, or use VLLMEngine, or leave `engine` out."
            )
        if self.adapter_folder is not None and not Path(self.adapter_folder).is_dir():
            raise ValueError(
                f"engine.adapter_folder={self.adapter_folder!r}: no such folder; make it, on a "
                "file system that the server sees too."
            )
        if self._pending is not None:
            self._pending.cancel()
        self._policy, self._proof = policy, None
        self._delivery = ServerDelivery(policy, self.adapter_folder)

    def sync(self) -> None:
        """Nothing is sent yet: ``generate`` reads off the adapters what has moved."""

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
        greedy: bool = False,
        progress: Callable[[GenerationProgress], None] | None = None,
    ) -> list[Rollout]:
        """As the protocol says; greedy log-probabilities are at temperature 1.

        Raises:
            ValueError: A prompt that does not fit, or a server that does not.
            EngineUnreachableError: The server was away for too long.
            RuntimeError: The server does not compute with the adapter that it was sent.
        """
        self._wait()
        policy, requests, check = self._asked(
            prompts,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            rollout=rollout,
            greedy=greedy,
        )
        answers = run(self._generate(policy, requests, group_size, check, progress))
        return rollouts_of(policy, prompts, requests, answers)

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
    ) -> Pending[tuple[list[Answer], dict[str, float]] | None]:
        """As ``AheadEngine`` says; errors as in ``generate``.

        Where the server is started anew meanwhile, the adapter of then is lost to it: all of the
        completions are sampled when they are asked for, from the policy of that moment.
        """
        self._wait()
        options: dict[str, Any] = {"group_size": group_size, "sampling": sampling}
        options |= {"seed": seed, "rollout": rollout}
        policy, requests, check = self._asked(prompts, **options)
        ready = run(self._made_ready(policy, check))

        async def draw(report: Report) -> tuple[list[Answer], dict[str, float]] | None:
            async with self._client() as client:
                drawing = asyncio.create_task(
                    self._draw(client, ready.name, requests[::group_size], group_size, {}, None)
                )
                try:
                    while not (await asyncio.wait([drawing], timeout=LOOK_UP_SECONDS))[0]:
                        report(GenerationProgress(0, len(requests), 0))
                    return await drawing, await counters(client)
                except RefusedError as error:
                    if error.status != HTTPStatus.NOT_FOUND:
                        raise
                    return None
                finally:
                    drawing.cancel()
                    await asyncio.gather(drawing, return_exceptions=True)

        def finish(found: tuple[list[Answer], dict[str, float]] | None) -> list[Rollout]:
            if found is None:
                self._forget()
                return self.generate(prompts, **options)
            answers, after = found
            self._metrics = ready.sent | cache_and_queue(ready.counters, after)
            return rollouts_of(policy, prompts, requests, answers)

        self._pending = Pending(lambda report: asyncio.run(draw(report)), finish)
        return self._pending

    def _wait(self) -> None:
        """One at a time: what is drawn needs its adapter until the end."""
        if self._pending is not None:
            self._pending.wait()

    def _client(self) -> ServerClient:
        return ServerClient(
            self.url, request_seconds=self.request_seconds, wait_seconds=self.wait_seconds
        )

    def _asked(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
        greedy: bool = False,
    ) -> tuple[Policy, list[Request], Callable[[int], None]]:
        """The policy, what is asked of the server, and the check of a context length."""
        policy = self._policy
        assert policy is not None, "bind() comes first"
        encoded = [policy.encode(prompt) for prompt in prompts]
        requests = requests_for(
            policy,
            prompts,
            encoded,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            rollout=rollout,
            greedy=greedy,
        )

        def check(context_length: int) -> None:
            check_context(prompts, encoded, sampling, context_length)

        return policy, requests, check

    async def _generate(
        self,
        policy: Policy,
        requests: Sequence[Request],
        group_size: int,
        check: Callable[[int], None],
        progress: Callable[[GenerationProgress], None] | None,
    ) -> list[Answer]:
        firsts = requests[::group_size]  # of each prompt: the server counts on from its seed
        found: dict[int, list[Answer]] = {}
        async with self._client() as client:
            for restarts in range(MAX_RESTARTS + 1):
                ready = await self._ready(client, policy, check)
                try:
                    answers = await self._draw(
                        client, ready.name, firsts, group_size, found, progress
                    )
                    break
                except RefusedError as error:
                    if error.status != HTTPStatus.NOT_FOUND or restarts == MAX_RESTARTS:
                        raise
                    self._forget()  # it knows no such adapter: another server than before
            self._metrics = ready.sent | cache_and_queue(ready.counters, await counters(client))
        return answers

    async def _made_ready(self, policy: Policy, check: Callable[[int], None]) -> Ready:
        async with self._client() as client:
            return await self._ready(client, policy, check)

    async def _ready(
        self, client: ServerClient, policy: Policy, check: Callable[[int], None]
    ) -> Ready:
        """A proved server that has the adapter of now."""
        assert self._delivery is not None
        was_training = policy.model.training
        policy.model.eval()  # no dropout in proofs
        try:
            proof = self._proof or await self._connect(client, policy)
            check(min(policy.context_length, proof.model.context_length))
            sent = await self._follow(client, proof)
        finally:
            policy.model.train(was_training)
        name = self._delivery.adapter_name or proof.model.name
        return Ready(name, sent, await counters(client))

    async def _connect(self, client: ServerClient, policy: Policy) -> Proof:
        assert self._delivery is not None
        model = await served_model(client, self.model)
        proof = Proof(policy, model, self.max_sampler_gap)
        await self._delivery.try_out(client, proof)
        self._proof = proof
        return proof

    async def _follow(self, client: ServerClient, proof: Proof) -> dict[str, float]:
        assert self._delivery is not None
        started = time.perf_counter()
        num_bytes = await self._delivery.deliver(client, proof)
        return {
            names.SYNC_SECONDS: time.perf_counter() - started,
            names.SYNC_MEGABYTES: (num_bytes or 0) / 1e6,
        }

    def _forget(self) -> None:
        assert self._delivery is not None
        self._proof = None
        self._delivery.forget()

    async def _draw(
        self,
        client: ServerClient,
        name: str,
        firsts: Sequence[Request],
        group_size: int,
        found: dict[int, list[Answer]],
        progress: Callable[[GenerationProgress], None] | None,
    ) -> list[Answer]:
        """All answers, in order.

        Args:
            client: Of the server.
            name: Of the model or adapter that is asked.
            firsts: The first request of each prompt.
            group_size: Completions of each.
            found: Answers by index of ``firsts``; those that it lacks are drawn into it.
            progress: Told of each prompt that is done.
        """

        async def ask(index: int) -> None:
            request = firsts[index]
            found[index] = await complete(client, name, request, num_samples=group_size)

        tasks = [asyncio.create_task(ask(i)) for i in range(len(firsts)) if i not in found]
        try:
            for next_one in asyncio.as_completed(tasks):
                await next_one
                if progress is not None:
                    progress(_progress(found, len(firsts) * group_size))
        finally:  # none goes on alone, at the server neither
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for _, answers in sorted(found.items()) for answer in answers]


def _progress(found: Mapping[int, Sequence[Answer]], total: int) -> GenerationProgress:
    answers = [answer for group in found.values() for answer in group]
    return GenerationProgress(len(answers), total, sum(len(a.token_ids) for a in answers))


def _check_settings(
    url: str, max_sampler_gap: float | None, wait_seconds: float, request_seconds: float
) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"engine.url={url!r}: give http://HOST:PORT of a `vllm serve`.")
    if max_sampler_gap is not None and not max_sampler_gap > 0:
        raise ValueError(
            f"engine.max_sampler_gap={max_sampler_gap}: give nats above 0, or null for no limit."
        )
    if not 0 <= wait_seconds < math.inf:
        raise ValueError(f"engine.wait_seconds={wait_seconds}: give seconds, 0 for no waiting.")
    if not 0 < request_seconds < math.inf:
        raise ValueError(f"engine.request_seconds={request_seconds}: give seconds above 0.")
