"""From sampled completions to the tensors of a training forward.

A micro-batch holds completions of *one* prompt, so that the prompt runs through the model once
for all of them. Completions are padded on the right: with causal attention no real token ever
sees a pad, so that no mask and no position shift is needed, for any decoder family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tropism.types import MicroBatch, Rollout


def micro_batches(
    rollouts: Sequence[Rollout], *, keep: Tensor, max_tokens: int, pad_token_id: int
) -> Iterator[MicroBatch]:
    """Cut the kept rows of a rollout batch into micro-batches of at most ``max_tokens`` tokens.

    Args:
        rollouts: P groups of completions.
        keep: [B] bool; rows that are False are left out.
        max_tokens: Most tokens of a micro-batch, the prompt once and pads included. A single
            completion over the budget still gets a micro-batch of its own.
        pad_token_id: Fills the right of shorter completions.
    """
    first_row = 0
    for rollout in rollouts:
        rows = [
            (first_row + i, completion.token_ids)
            for i, completion in enumerate(rollout.completions)
            if keep[first_row + i]
        ]
        first_row += len(rollout.completions)
        rows.sort(key=lambda row: -len(row[1]))  # alike lengths together: little padding
        while rows:
            space = max_tokens - len(rollout.prompt_token_ids)
            size = max(1, space // len(rows[0][1]))
            yield _collate(rollout.prompt_token_ids, rows[:size], pad_token_id)
            rows = rows[size:]


def _collate(
    prompt: tuple[int, ...], rows: Sequence[tuple[int, tuple[int, ...]]], pad_token_id: int
) -> MicroBatch:
    targets = torch.full((len(rows), len(rows[0][1])), pad_token_id)
    mask = torch.zeros_like(targets, dtype=torch.bool)
    for i, (_, token_ids) in enumerate(rows):
        targets[i, : len(token_ids)] = torch.tensor(token_ids)
        mask[i, : len(token_ids)] = True
    return MicroBatch(torch.tensor([row for row, _ in rows]), torch.tensor(prompt), targets, mask)
