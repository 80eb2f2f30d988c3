"""Samples with vLLM in the trainer's process, on its device; the only module that imports vLLM.

How it keeps to the trainer's policy:
1. prompts are encoded and completions decoded here; vLLM sees token ids alone;
2. every completion is a request of its own, with a seed keyed as the trainer's own engine keys its
   randomness; only rounding depends on what is computed side by side;
3. before each ``generate`` whatever has moved since the last one is sent, and only that
   (``weight_sync``); the prefix cache is emptied, and each linear that was sent has to prove that
   it computes with the new weights (``engine_probe``);
4. vLLM is loaded by the first ``generate``, and draws none of the trainer's random numbers;
5. with ``begin`` it draws in a thread, from copies of the weights, while the trainer goes on.

    engine: {class_path: tropism.rollouts.vllm_engine.VLLMEngine}
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from tropism.measurements import metrics as names
from tropism.policy import ADAPTER, Policy
from tropism.rollouts import engine_probe
from tropism.rollouts.engine import Sampling
from tropism.rollouts.pending import Pending, Report
from tropism.rollouts.requests import Answer, Request, requests_for, rollouts_of
from tropism.rollouts.transformers_engine import check_context
from tropism.rollouts.vllm_process import require_vllm, starting_vllm
from tropism.rollouts.vllm_settings import (
    EngineArgs,
    SleepLevel,
    Sync,
    arguments,
    check_settings,
    require_head_size,
)
from tropism.rollouts.vllm_steps import answer_all, cache_and_queue, sampling_parameters
from tropism.rollouts.weight_delivery import Delivery
from tropism.rollouts.weight_sync import WeightSync
from tropism.types import GenerationProgress, Prompt, Rollout


class VLLMEngine:
    """vLLM beside the trainer, on CPU or CUDA.

    Args:
        sync: How weights follow the trainer's: ``merged`` sends W_0 + scaling B A of the linears
            that moved, ``adapter`` the adapter itself, which costs two small products per linear
            and token. A policy without adapters is sent whole either way.
        max_sampler_gap: Largest mean gap to the trainer's log-probabilities, nats a token, before
            the run stops; null for no limit.
        sleep_level: What vLLM gives back between rollouts, on CUDA: 0 nothing; 1 its cache, and
            its weights go to CPU memory; 2 both are dropped, and all weights sent again.
        engine_args: Further arguments of vLLM by its names (``max_num_seqs``, ``block_size``,
            ``gpu_memory_utilization``, ``kv_cache_memory_bytes``, ``enforce_eager``, ...).

    Raises:
        ValueError: Settings that exclude each other, or that are not the user's to set.
    """

    def __init__(
        self,
        sync: Sync = "merged",
        max_sampler_gap: float | None = 0.2,
        sleep_level: SleepLevel = 0,
        engine_args: EngineArgs | None = None,
    ) -> None:
        self.engine_args = dict(engine_args or {})
        check_settings(
            self.engine_args, sync=sync, sleep_level=sleep_level, max_sampler_gap=max_sampler_gap
        )
        self.sync_by: Sync = sync
        self.sleep_level: SleepLevel = sleep_level
        self.max_sampler_gap = max_sampler_gap
        self._policy: Policy | None = None
        self._llm: Any = None  # vllm.LLM
        self._delivery: Delivery | None = None
        self._is_asleep = False
        self._metrics: Mapping[str, float] = {}
        self._pending: Pending[list[Answer]] | None = None

    def bind(self, policy: Policy) -> None:
        """Take the policy; an engine that was started with another one is closed.

        Raises:
            ImportError: vLLM is not installed; says how to get it.
        """
        require_vllm()
        self.close()
        self._policy = policy

    def sync(self) -> None:
        """Nothing is sent yet: ``generate`` finds out what has moved."""
        if self._delivery is not None:
            self._delivery.moved()

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of what each of vLLM's linears computes now, by its name; empty before a start.

        Without adapters: those of ``sync: adapter`` are in none of its linears.
        """
        if self._llm is None:
            return {}
        _wait_for_all()
        (found,) = self._llm.apply_model(engine_probe.fingerprints)
        prints: dict[str, str] = found
        return prints

    def close(self) -> None:
        """Let go of vLLM and its memory; the next ``generate`` starts it anew.

        So do the other engines of this process: vLLM's have one distributed state in common, and
        whichever ends first takes it along.
        """
        if self._llm is not None:
            _end_all()

    # -- sampling -----------------------------------------------------------------------------

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
            ValueError: A prompt that does not fit, or settings that this vLLM does not take.
            RuntimeError: vLLM does not compute with the weights that it was sent.
        """
        requests = self._requests(
            prompts,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            rollout=rollout,
            greedy=greedy,
        )
        with isolate_rng():
            delivery, sent = self._made_ready()
            answers = self._draw(delivery.lora_request, requests, progress)
            self._sleep(delivery)
        return self._finish(prompts, requests, sent, answers)

    def begin(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
    ) -> Pending[list[Answer]]:
        """As ``AheadEngine`` says; errors as in ``generate``.

        The thread draws from torch's global generator (vLLM's sampler on CPUs does so even where
        every request has a seed), though no completion depends on it.
        """
        requests = self._requests(
            prompts, group_size=group_size, sampling=sampling, seed=seed, rollout=rollout
        )
        assert self._policy is not None
        with isolate_rng():
            delivery, sent = self._made_ready()
        lora_request = delivery.lora_request
        # On the trainer's stream: a thread's own would not wait for the weights just sent.
        device = self._policy.device
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def draw(report: Report) -> list[Answer]:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return self._draw(lora_request, requests, report)

        self._pending = Pending(draw, partial(self._finish, prompts, requests, sent))
        return self._pending

    def _requests(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: Sampling,
        seed: int,
        rollout: int,
        greedy: bool = False,
    ) -> list[Request]:
        policy = self._policy
        assert policy is not None, "bind() comes first"
        encoded = [policy.encode(prompt) for prompt in prompts]
        check_context(prompts, encoded, sampling, self._context_length(policy))
        return requests_for(
            policy,
            prompts,
            encoded,
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            rollout=rollout,
            greedy=greedy,
        )

    def _made_ready(self) -> tuple[Delivery, Mapping[str, float]]:
        """Started, done with everything else, and with the trainer's weights of now."""
        assert self._policy is not None
        _wait_for_all()
        delivery = self._delivery or self._start(self._policy)
        return delivery, self._follow(delivery)

    def _draw(
        self,
        lora_request: Any,
        requests: Sequence[Request],
        progress: Callable[[GenerationProgress], None] | None,
    ) -> list[Answer]:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        asked = [
            (
                tokens_input(list(request.prompt_token_ids)),
                SamplingParams(**sampling_parameters(request), output_kind=kind),
            )
            for request in requests
        ]
        return answer_all(self._llm.llm_engine, asked, lora_request=lora_request, progress=progress)

    def _finish(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        sent: Mapping[str, float],
        answers: Sequence[Answer],
    ) -> list[Rollout]:
        assert self._policy is not None
        self._metrics = {**sent, **cache_and_queue(requests, answers)}
        return rollouts_of(self._policy, prompts, requests, answers)

    def _context_length(self, policy: Policy) -> int:
        own = self.engine_args.get("max_model_len")
        return min(policy.context_length, own) if isinstance(own, int) else policy.context_length

    # -- start and sleep ----------------------------------------------------------------------

    def _start(self, policy: Policy) -> Delivery:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                "engine: VLLMEngine runs in the one process of a run; set trainer.devices to 1, or "
                "leave `engine` out."
            )
        if any(engine() is None for engine, _ in _RUNNING):
            _end_all()
        sync: Sync = self.sync_by if policy.uses_lora else "merged"
        with starting_vllm():
            from vllm import LLM
            from vllm import EngineArgs as Known
            from vllm.lora.request import LoRARequest
            from vllm.platforms import current_platform

            is_cpu = current_platform.is_cpu()
            if is_cpu:
                from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

                require_head_size(policy, CPUAttentionBackend.get_supported_head_sizes())
            chosen = arguments(
                self.engine_args,
                folder=policy.source,
                dtype=str(next(policy.base.parameters()).dtype).removeprefix("torch."),
                context_length=policy.context_length,
                sync=sync,
                lora_rank=_rank(policy),
                sleep_level=self.sleep_level,
                is_cpu=is_cpu,
                known=Known.__dataclass_fields__,
            )
            self._llm = LLM(**chosen)
        _RUNNING.append((ref(self), self._llm))
        (packed,) = self._llm.apply_model(engine_probe.packed)
        weights = WeightSync(
            policy,
            packed=packed,
            dtype=getattr(torch, chosen["dtype"]),
            has_base=chosen.get("load_format") != "dummy",
        )
        try:
            self._delivery = Delivery(self._llm, weights, sync=sync, request=LoRARequest)
        except ValueError:
            self.close()
            raise
        return self._delivery

    def _follow(self, delivery: Delivery) -> Mapping[str, float]:
        """Wake vLLM up, and bring its weights to the trainer's of now; what that took."""
        started, was_asleep = time.perf_counter(), self._is_asleep
        if was_asleep:
            self._llm.wake_up(tags=["weights"])
        try:
            num_bytes = delivery.deliver()
        except BaseException:
            self.close()
            raise
        if was_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            delivery.reset_prefix_cache()
        self._is_asleep = False
        return {
            names.SYNC_SECONDS: time.perf_counter() - started,
            names.SYNC_MEGABYTES: (num_bytes or 0) / 1e6,
        }

    def _sleep(self, delivery: Delivery) -> None:
        if self.sleep_level:
            self._llm.sleep(level=self.sleep_level)
            self._is_asleep = True
            if self.sleep_level == 2:
                delivery.forget()


# What runs is held here: collected as garbage, a vLLM would take the others' state along.
_RUNNING: list[tuple[ref[VLLMEngine], Any]] = []


def _wait_for_all() -> None:
    """vLLM's engines have state in common: one at a time."""
    for reference, _ in _RUNNING:
        if (engine := reference()) is not None and engine._pending is not None:
            engine._pending.wait()


def _end_all() -> None:
    for reference, _ in _RUNNING:
        if (engine := reference()) is not None and engine._pending is not None:
            engine._pending.cancel()
    for reference, llm in _RUNNING:
        llm.llm_engine.engine_core.shutdown()
        if (engine := reference()) is not None:
            engine._llm = engine._delivery = None
            engine._is_asleep = False
    _RUNNING.clear()
    gc.collect()


def _rank(policy: Policy) -> int:
    """R; 0 where all weights train."""
    model: Any = policy.model
    return int(model.peft_config[ADAPTER].r) if policy.uses_lora else 0
