"""Samples with the trainer's own modules, on whatever device they are.

Each prompt is prefilled once and its cache repeated G times; sampling runs on merged weights
(un-merged adapters would cost two small products per linear and token); rows that ended leave
the batch, so that a few long completions do not pay for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tropism.forward.memory import give_back
from tropism.objective.logprobs import log_softmax
from tropism.policy import Policy
from tropism.rollouts.decoder import Decoder
from tropism.rollouts.engine import Sampling
from tropism.rollouts.packed_layers import PackedLayers
from tropism.rollouts.random_streams import draw, uniforms
from tropism.types import Completion, GenerationProgress, Prompt, Rollout

PROGRESS_EVERY_TOKENS = 8


class TransformersEngine:
    """The engine that is always there: CPU or GPU, any family transformers loads.

    Args:
        max_rows: Completions sampled at the same time; bounds the memory of the cache.
    """

    def __init__(self, max_rows: int = 64) -> None:
        if max_rows < 1:
            raise ValueError(f"engine.max_rows={max_rows}: give at least 1.")
        self.max_rows = max_rows
        self._policy: Policy | None = None
        self._eos: Tensor  # on the device of the policy, once for each ``generate``

    def bind(self, policy: Policy) -> None:
        self._policy = policy

    def sync(self) -> None:
        """Nothing is kept between calls: every ``generate`` merges the weights of the moment."""

    def ends(self, tokens: Tensor, rows: Tensor, position: int) -> Tensor:
        """Which completions end with the token just drawn; benchmarks force lengths here.

        Args:
            tokens: [B'] drawn now, by the completions that go on.
            rows: [B'] their rows in the rollout batch.
            position: Index of the token in its completion, from 0.
        """
        return torch.isin(tokens, self._eos)

    def _ends_from(self, first: int, tokens: Tensor, rows: Tensor, position: int) -> Tensor:
        return self.ends(tokens, rows + first, position)

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
        policy = self._policy
        assert policy is not None, "bind() comes first"
        self._eos = torch.tensor(sorted(policy.eos_token_ids), device=policy.device)
        encoded = [policy.encode(prompt) for prompt in prompts]
        check_context(prompts, encoded, sampling, policy.context_length)
        size = max(1, self.max_rows // group_size)
        total = len(prompts) * group_size
        rollouts: list[Rollout] = []
        was_training = policy.model.training
        policy.model.eval()  # no dropout in the sampler
        try:
            num_rows = min(total, self.max_rows)
            with torch.no_grad(), policy.merged(num_rows=num_rows):
                packed = None
                if PackedLayers.fit(policy):
                    longest = max(map(len, encoded)) + sampling.max_new_tokens
                    packed = PackedLayers(policy, num_positions=longest)
                for start in range(0, len(prompts), size):
                    report = _reporter(progress, rollouts, total)
                    rollouts += _generate(
                        policy,
                        prompts[start : start + size],
                        encoded[start : start + size],
                        group_size=group_size,
                        sampling=sampling,
                        seed=seed,
                        rollout=rollout,
                        greedy=greedy,
                        report=report,
                        packed=packed,
                        ends=partial(self._ends_from, start * group_size),
                    )
        finally:
            policy.model.train(was_training)
            if policy.device.type == "cpu":
                give_back()
        return rollouts


def _reporter(
    progress: Callable[[GenerationProgress], None] | None, finished: Sequence[Rollout], total: int
) -> Callable[[int, int], None]:
    """Adds what earlier calls finished to what the present one reports."""
    completions = [completion for rollout in finished for completion in rollout.completions]
    tokens = sum(len(completion.token_ids) for completion in completions)

    def report(num_done: int, num_tokens: int) -> None:
        if progress is not None:
            progress(GenerationProgress(len(completions) + num_done, total, tokens + num_tokens))

    return report


def check_context(
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    sampling: Sampling,
    context_length: int,
) -> None:
    """Refuse prompts that leave too little room for a completion.

    Raises:
        ValueError: Names the longest prompt and the settings to change.
    """
    longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
    needed = len(encoded[longest]) + sampling.max_new_tokens
    if needed > context_length:
        raise ValueError(
            f"prompt {prompts[longest].id!r} has {len(encoded[longest])} tokens; with "
            f"sampling.max_new_tokens={sampling.max_new_tokens} that is {needed}, more than the "
            f"model's context of {context_length}. Shorten the prompts or max_new_tokens."
        )


def _generate(
    policy: Policy,
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    *,
    group_size: int,
    sampling: Sampling,
    seed: int,
    rollout: int,
    greedy: bool,
    report: Callable[[int, int], None],
    packed: PackedLayers | None,
    ends: Callable[[Tensor, Tensor, int], Tensor],
) -> list[Rollout]:
    device = policy.device
    limit = sampling.max_new_tokens
    num_rows = len(prompts) * group_size
    if greedy:
        randomness = torch.zeros(num_rows, limit)
    else:
        randomness = torch.stack(
            [
                uniforms(seed=seed, rollout=rollout, prompt_id=p.id, sample=g, num=limit)
                for p in prompts
                for g in range(group_size)
            ]
        )
    randomness = randomness.to(device)

    decoder = Decoder(policy, encoded, group_size=group_size, limit=limit, packed=packed)
    logits = decoder.logits
    tokens = torch.zeros(num_rows, limit, dtype=torch.long, device=device)
    logprobs = torch.zeros(num_rows, limit, device=device)
    counts = torch.full((num_rows,), limit, device=device)
    live = torch.arange(num_rows, device=device)  # rows of the cache -> rows of the output
    ended_rows = torch.zeros(num_rows, dtype=torch.bool, device=device)

    for t in range(limit):
        distribution = log_softmax(logits, sampling.temperature)  # (B', V) fp32
        token = distribution.argmax(dim=-1) if greedy else draw(distribution, randomness[live, t])
        tokens[live, t] = token
        logprobs[live, t] = distribution.gather(1, token[:, None]).squeeze(1)
        ended = ends(token, live, t)
        counts[live[ended]] = t + 1
        ended_rows[live[ended]] = True
        if t % PROGRESS_EVERY_TOKENS == 0:
            done = int(ended_rows.sum())
            report(done, int(counts[ended_rows].sum()) + (num_rows - done) * (t + 1))
        keep = (~ended).nonzero().squeeze(1)
        if len(keep) == 0 or t + 1 == limit:
            break
        if len(keep) < len(live):  # rows that ended leave, with their part of the cache
            decoder.keep(keep)
            live, token = live[keep], token[keep]
        logits = decoder.step(token)
    report(num_rows, int(counts.sum()))
    return _collect(policy, prompts, encoded, group_size, tokens, logprobs, counts, ended_rows)


def _collect(
    policy: Policy,
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    group_size: int,
    tokens: Tensor,
    logprobs: Tensor,
    counts: Tensor,
    ended: Tensor,
) -> list[Rollout]:
    tokens, logprobs = tokens.cpu(), logprobs.cpu()
    lengths, stopped = counts.tolist(), ended.tolist()
    completions = []
    for row, length in enumerate(lengths):
        ids = tuple(tokens[row, :length].tolist())
        completions.append(
            Completion(
                token_ids=ids,
                text=policy.decode(ids),
                sampler_logprobs=logprobs[row, :length].clone(),
                finish_reason="stop" if stopped[row] else "length",
            )
        )
    return [
        Rollout(prompt, ids, tuple(completions[i * group_size : (i + 1) * group_size]))
        for i, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
    ]
