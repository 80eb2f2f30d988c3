"""What is asked of an engine that takes token ids, and how its answers become rollouts.

Shared by engines in this process and elsewhere; knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tropism.policy import Policy
from tropism.rollouts.engine import Sampling
from tropism.rollouts.random_streams import request_seed
from tropism.types import Completion, FinishReason, Prompt, Rollout


@dataclass(frozen=True)
class Request:
    """One completion to draw.

    Args:
        prompt_token_ids: As the trainer sees the prompt.
        stop_token_ids: Every token that ends a completion; the engine's own idea of EOS does not
            count.
        max_new_tokens: Completion limit in tokens.
        temperature: 0 takes the likeliest token.
        seed: Of this completion alone.
    """

    prompt_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass
class Answer:
    """What an engine drew for one request; grows while it is drawn.

    Args:
        token_ids: With the token that ended it.
        logprobs: Of each token, at the temperature of the request.
        finish_reason: As the engine calls it: ``stop`` or ``length``.
        num_cached_tokens: Prompt tokens that the engine had computed before.
        seconds_queued: Time until the engine began with it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    seconds_queued: float = 0.0


def requests_for(
    policy: Policy,
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    *,
    group_size: int,
    sampling: Sampling,
    seed: int,
    rollout: int,
    greedy: bool,
) -> list[Request]:
    """B requests, row by row. Seeds are keyed as the trainer's own engine keys its uniforms."""
    stops = tuple(sorted(policy.eos_token_ids))
    return [
        Request(
            prompt_token_ids=ids,
            stop_token_ids=stops,
            max_new_tokens=sampling.max_new_tokens,
            temperature=0.0 if greedy else sampling.temperature,
            seed=request_seed(seed=seed, rollout=rollout, prompt_id=prompt.id, sample=sample),
        )
        for prompt, ids in zip(prompts, encoded, strict=True)
        for sample in range(group_size)
    ]


def rollouts_of(
    policy: Policy,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    answers: Sequence[Answer],
) -> list[Rollout]:
    """P groups from the answers to ``requests_for``.

    Raises:
        RuntimeError: An answer that is no completion (aborted, say, or without log-probabilities).
    """
    group_size = len(requests) // len(prompts)
    completions = [
        _completion(policy, request, answer)
        for request, answer in zip(requests, answers, strict=True)
    ]
    return [
        Rollout(
            prompt,
            requests[i * group_size].prompt_token_ids,
            tuple(completions[i * group_size : (i + 1) * group_size]),
        )
        for i, prompt in enumerate(prompts)
    ]


def _completion(policy: Policy, request: Request, answer: Answer) -> Completion:
    ids = tuple(answer.token_ids)
    ended = bool(ids) and ids[-1] in request.stop_token_ids
    reason: FinishReason = "stop" if ended else "length"
    is_whole = ended or len(ids) == request.max_new_tokens
    if answer.finish_reason != reason or not is_whole or len(answer.logprobs) != len(ids):
        raise RuntimeError(
            f"the engine ended a completion of {len(ids)} tokens (limit {request.max_new_tokens}) "
            f"with {answer.finish_reason!r} and {len(answer.logprobs)} log-probabilities: that is "
            "no completion to learn from."
        )
    return Completion(ids, policy.decode(ids), torch.tensor(answer.logprobs), reason)
