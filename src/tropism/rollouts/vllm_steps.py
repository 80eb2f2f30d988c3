"""Runs a vLLM engine step by step until every request is answered; imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tropism.measurements import metrics as names
from tropism.rollouts.requests import Answer, Request
from tropism.types import GenerationProgress

PROGRESS_EVERY_TOKENS = 8


def sampling_parameters(request: Request) -> dict[str, Any]:
    """What vLLM's ``SamplingParams`` calls a request's settings."""
    return {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are the trainer's
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
    }


def answer_all(
    engine: Any,
    requests: Sequence[tuple[Any, Any]],
    *,
    lora_request: Any,
    progress: Callable[[GenerationProgress], None] | None,
) -> list[Answer]:
    """The answers to prompts with their ``SamplingParams``, in order.

    Args:
        engine: ``LLM.llm_engine``, idle; idle again afterwards, also after an exception.
        requests: Prompt and parameters of each, with outputs as deltas.
        lora_request: With which adapter; None for none.
        progress: Told every few tokens.
    """
    found = {str(row): Answer() for row in range(len(requests))}
    sent: list[str] = []
    num_tokens = num_done = num_steps = 0
    try:
        for row, (prompt, parameters) in zip(found, requests, strict=True):
            sent.append(engine.add_request(row, prompt, parameters, lora_request=lora_request))
        while engine.has_unfinished_requests():
            for output in engine.step():
                num_tokens += _add(found[output.request_id], output)
                num_done += output.finished
            is_last = num_done == len(requests)
            if progress is not None and (num_steps % PROGRESS_EVERY_TOKENS == 0 or is_last):
                progress(GenerationProgress(num_done, len(requests), num_tokens))
            num_steps += 1
    except BaseException:  # Ctrl-C too: nothing may be left over for the next call
        engine.abort_request(sent, internal=True)
        raise
    return list(found.values())


def cache_and_queue(requests: Sequence[Request], answers: Sequence[Answer]) -> Mapping[str, float]:
    """Share of prompt tokens found in the prefix cache, and mean time in the queue."""
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    return {
        names.PREFIX_CACHE_HITS: sum(a.num_cached_tokens for a in answers) / num_prompt_tokens,
        names.QUEUE_SECONDS: sum(a.seconds_queued for a in answers) / len(answers),
    }


def _add(answer: Answer, output: Any) -> int:
    """Take over what a step drew for a request; returns the number of tokens."""
    (drawn,) = output.outputs
    answer.token_ids += drawn.token_ids
    answer.logprobs += [
        of_token[token].logprob
        for token, of_token in zip(drawn.token_ids, drawn.logprobs or (), strict=True)
    ]
    if output.finished:
        times = output.metrics
        answer.finish_reason = drawn.finish_reason
        answer.num_cached_tokens = output.num_cached_tokens or 0
        answer.seconds_queued = max(0.0, times.scheduled_ts - times.queued_ts)
    return len(drawn.token_ids)
