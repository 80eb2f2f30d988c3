"""Answers to held-out prompts, and the KL between starting and present policy along them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from tropism.measurements.kl_drift import TokenKL, both_kls
from tropism.policy import Policy
from tropism.tasks.base import Task
from tropism.types import Completion, MicroBatch, Prompt, Rollout

Scope = Literal["completion", "all"]


def answered(policy: Policy, prompt: Prompt, token_ids: Sequence[int]) -> Rollout:
    """A prompt with one answer that was not sampled now.

    Raises:
        ValueError: The two do not fit into the model's context.
    """
    ids, answer = policy.encode(prompt), tuple(token_ids)
    if len(ids) + len(answer) > policy.context_length:
        raise ValueError(
            f"prompt {prompt.id!r} and its answer have {len(ids) + len(answer)} tokens, more than "
            f"the model's context of {policy.context_length}. Leave that prompt out."
        )
    completion = Completion(answer, policy.decode(answer), torch.zeros(len(answer)), "stop")
    return Rollout(prompt, ids, (completion,))


def gold_answers(policy: Policy, task: Task, prompts: Sequence[Prompt]) -> list[Rollout]:
    """The prompts for which the task knows a right answer, with it; ends as the model's do."""
    known = [(prompt, text) for prompt in prompts if (text := task.gold(prompt)) is not None]
    return [answered(policy, p, policy.encode_completion(p, text)) for p, text in known]


@torch.no_grad()
def measure_drift(
    policy: Policy, rollouts: Sequence[Rollout], *, scope: Scope, max_tokens: int
) -> TokenKL:
    """KL between the starting policy and that of now along one answer for each prompt.

    Args:
        policy: Knows its start.
        rollouts: One completion each.
        scope: The tokens of the ``completion`` (EOS included), or ``all`` of prompt and completion
            but the very first, which nothing predicts.
        max_tokens: Tokens of one forward, padding included; a longer sequence runs alone.
    """
    forward, reverse, prompts = [], [], []
    was_training = policy.model.training
    policy.model.eval()  # no dropout
    try:
        for uncopied in _batches(
            rollouts, scope=scope, max_tokens=max_tokens, pad_token_id=policy.pad_token_id
        ):
            part = uncopied.to(policy.device)
            tuned = policy.completion_states(part)
            with policy.starting():
                start = policy.completion_states(part)
            kls = both_kls(start, tuned, starting_head=policy.starting_head, tuned_head=policy.head)
            forward.append(kls[0].cpu())
            reverse.append(kls[1].cpu())
            rows = uncopied.rows[:, None].expand(uncopied.mask.shape)  # (M, T)
            prompts.append(rows[uncopied.mask])
    finally:
        policy.model.train(was_training)
    return TokenKL(torch.cat(forward), torch.cat(reverse), torch.cat(prompts))


def _batches(
    rollouts: Sequence[Rollout], *, scope: Scope, max_tokens: int, pad_token_id: int
) -> Iterator[MicroBatch]:
    """Whole sequences of alike length side by side.

    Each prompt has one answer, so that packs, which lay a prompt once for several, would gain
    nothing. A micro-batch shares its prompt: that is the first token, mostly BOS, and everything
    behind it is "completion", of which the mask lets through what is to be measured.
    """
    by_first: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for row, rollout in enumerate(rollouts):
        whole = rollout.prompt_token_ids + rollout.completions[0].token_ids
        by_first[whole[0]].append((row, whole[1:]))
    for first, unsorted in by_first.items():
        left = sorted(unsorted, key=lambda item: -len(item[1]))
        while left:
            size = max(1, max_tokens // (len(left[0][1]) + 1))
            chosen, left = left[:size], left[size:]
            targets = pad_sequence(
                [torch.tensor(tokens) for _, tokens in chosen],
                batch_first=True,
                padding_value=pad_token_id,
            )  # (M, T)
            mask = torch.zeros_like(targets, dtype=torch.bool)
            for i, (row, tokens) in enumerate(chosen):
                given = len(rollouts[row].prompt_token_ids) - 1 if scope == "completion" else 0
                mask[i, given : len(tokens)] = True
            rows = torch.tensor([row for row, _ in chosen])
            yield MicroBatch(rows, torch.tensor([first]), targets, mask)
