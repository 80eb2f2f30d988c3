"""From sampled completions to the tensors of a training forward.

A micro-batch holds completions of *one* prompt, so that the prompt runs through the model once
for all of them; a pack holds completions of any prompts, each behind its own (SFT).

Completions of a micro-batch are padded on the right: with causal attention no real token ever
sees a pad, so that no mask and no position shift is needed, for any decoder family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tropism.types import MicroBatch, Pack, Rollout


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


def rows_of(rollouts: Sequence[Rollout], rows: Sequence[int], *, pad_token_id: int) -> MicroBatch:
    """These rows of a rollout batch, all of one prompt and in this order, as one micro-batch."""
    group_size = len(rollouts[0].completions)
    (prompt,) = {row // group_size for row in rows}
    completions = rollouts[prompt].completions
    chosen = [(row, completions[row % group_size].token_ids) for row in rows]
    return _collate(rollouts[prompt].prompt_token_ids, chosen, pad_token_id)


def packs(
    rollouts: Sequence[Rollout], *, max_tokens: int, pad_token_id: int, should_join: bool
) -> Iterator[Pack]:
    """Lay all completions end to end, each behind its own prompt, in packs of ``max_tokens``.

    Args:
        rollouts: Groups of completions; rows are numbered through them.
        max_tokens: Most tokens of a pack. A longer row gets a pack of its own.
        pad_token_id: Fills ``targets`` only; nothing that is padded runs through the model.
        should_join: False gives every row a pack of its own, for models whose layers carry a
            state from one token to the next and cannot tell rows apart.
    """
    pack: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    num_tokens = row = 0
    for rollout in rollouts:
        for completion in rollout.completions:
            length = len(rollout.prompt_token_ids) + len(completion.token_ids)
            if pack and (not should_join or num_tokens + length > max_tokens):
                yield _pack(pack, pad_token_id)
                pack, num_tokens = [], 0
            pack.append((row, rollout.prompt_token_ids, completion.token_ids))
            num_tokens += length
            row += 1
    if pack:
        yield _pack(pack, pad_token_id)


def _pack(rows: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]], pad_token_id: int) -> Pack:
    targets, mask = _padded([token_ids for _, _, token_ids in rows], pad_token_id)
    input_ids: list[int] = []
    position_ids: list[int] = []
    predicts: list[int] = []
    for _, prompt, completion in rows:
        first = len(input_ids) + len(prompt) - 1  # this state predicts the first token
        predicts += range(first, first + len(completion))
        input_ids += [*prompt, *completion]
        position_ids += range(len(prompt) + len(completion))
    return Pack(
        torch.tensor([row for row, _, _ in rows]),
        torch.tensor(input_ids),
        torch.tensor(position_ids),
        torch.tensor(predicts),
        targets,
        mask,
    )


def _collate(
    prompt: tuple[int, ...], rows: Sequence[tuple[int, tuple[int, ...]]], pad_token_id: int
) -> MicroBatch:
    targets, mask = _padded([token_ids for _, token_ids in rows], pad_token_id)
    return MicroBatch(torch.tensor([row for row, _ in rows]), torch.tensor(prompt), targets, mask)


def _padded(rows: Sequence[tuple[int, ...]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """[M, T] tokens and the mask of the real ones."""
    targets = torch.full((len(rows), max(map(len, rows))), pad_token_id)
    mask = torch.zeros_like(targets, dtype=torch.bool)
    for i, token_ids in enumerate(rows):
        targets[i, : len(token_ids)] = torch.tensor(token_ids)
        mask[i, : len(token_ids)] = True
    return targets, mask
