"""From sampled completions to the tensors of a training forward.

A pack holds completions of any prompts, end to end, each prompt once for all of them: the way of
training wherever attention alone carries tokens to tokens. A micro-batch holds completions of
*one* prompt, which runs in front of each: for models with recurrent states, and for probes.

Completions of a micro-batch are padded on the right: with causal attention no real token ever
sees a pad, so that no mask and no position shift is needed, for any decoder family.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tropism.types import Group, MicroBatch, Pack, Rollout


def training_batches(
    rollouts: Sequence[Rollout],
    *,
    keep: Tensor,
    max_tokens: int,
    pad_token_id: int,
    can_pack: bool,
) -> Iterator[MicroBatch | Pack]:
    """The kept rows of a rollout batch, as packs where the model takes them."""
    cut = packs if can_pack else micro_batches
    yield from cut(rollouts, keep=keep, max_tokens=max_tokens, pad_token_id=pad_token_id)


def micro_batches(
    rollouts: Sequence[Rollout], *, keep: Tensor, max_tokens: int, pad_token_id: int
) -> Iterator[MicroBatch]:
    """Cut the kept rows of a rollout batch into micro-batches of at most ``max_tokens`` tokens.

    Args:
        rollouts: P groups of completions.
        keep: [B] bool; rows that are False are left out.
        max_tokens: Most tokens of a micro-batch, prompts and pads included. A single completion
            over the budget still gets a micro-batch of its own.
        pad_token_id: Fills the right of shorter completions.
    """
    for rollout, kept in zip(rollouts, _kept_rows(rollouts, keep), strict=True):
        rows = kept
        while rows:
            size = max(1, max_tokens // (len(rollout.prompt_token_ids) + len(rows[0][1])))
            yield _collate(rollout.prompt_token_ids, rows[:size], pad_token_id)
            rows = rows[size:]


def _kept_rows(
    rollouts: Sequence[Rollout], keep: Tensor
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """Of each group the kept rows and their tokens, alike lengths together: little padding."""
    first_row = 0
    for rollout in rollouts:
        rows = [
            (first_row + i, completion.token_ids)
            for i, completion in enumerate(rollout.completions)
            if keep[first_row + i]
        ]
        first_row += len(rollout.completions)
        yield sorted(rows, key=lambda row: -len(row[1]))


def rows_of(rollouts: Sequence[Rollout], rows: Sequence[int], *, pad_token_id: int) -> MicroBatch:
    """These rows of a rollout batch, all of one prompt and in this order, as one micro-batch."""
    group_size = len(rollouts[0].completions)
    (prompt,) = {row // group_size for row in rows}
    completions = rollouts[prompt].completions
    chosen = [(row, completions[row % group_size].token_ids) for row in rows]
    return _collate(rollouts[prompt].prompt_token_ids, chosen, pad_token_id)


def packs(
    rollouts: Sequence[Rollout], *, keep: Tensor, max_tokens: int, pad_token_id: int
) -> Iterator[Pack]:
    """Lay the kept rows end to end behind their prompts, in packs of at most ``max_tokens``.

    Args:
        rollouts: Groups of completions; rows are numbered through them.
        keep: [B] bool; rows that are False are left out.
        max_tokens: Most tokens of a pack, each prompt once. A single completion over the budget
            still gets a pack of its own.
        pad_token_id: Fills ``targets`` only; nothing that is padded runs through the model.
    """
    groups = list(_kept_rows(rollouts, keep))
    sizes = [
        (len(rollout.prompt_token_ids), [len(token_ids) - 1 for _, token_ids in rows])
        for rollout, rows in zip(rollouts, groups, strict=True)
    ]
    # As few packs as the budget allows, and then of alike size: the largest sets the memory.
    fewest = _num_packs(sizes, max_tokens)
    max_tokens = bisect_left(
        range(max_tokens), -fewest, key=lambda limit: -_num_packs(sizes, limit)
    )
    pack = _PackBuilder()
    for index, rows in enumerate(groups):
        prompt = rollouts[index].prompt_token_ids
        is_open = False  # whether the pack holds this prompt already
        for row, token_ids in rows:
            needed = len(token_ids) - 1 + (0 if is_open else len(prompt))
            if pack.rows and len(pack.input_ids) + needed > max_tokens:
                yield pack.build(pad_token_id)
                pack, is_open = _PackBuilder(), False
            if not is_open:
                pack.open(prompt)
                is_open = True
            pack.add(row, token_ids)
    if pack.rows:
        yield pack.build(pad_token_id)


def _num_packs(sizes: Sequence[tuple[int, Sequence[int]]], limit: int) -> int:
    """How many packs ``packs`` makes at this limit; fewer or as many at a larger one.

    Args:
        sizes: Of each group the tokens of its prompt, and of each of its rows.
    """
    num = used = 0
    for prompt, rows in sizes:
        is_open = False
        for row in rows:
            needed = row if is_open else prompt + row
            if not num or used + needed > limit:
                num, used, needed = num + 1, 0, prompt + row
            used, is_open = used + needed, True
    return num


class _PackBuilder:
    """A pack that grows; prompts are opened, completions added behind the last one."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.completions: list[tuple[int, ...]] = []
        self.input_ids: list[int] = []
        self.position_ids: list[int] = []
        self.predicts: list[int] = []
        self.groups: list[tuple[int, int, list[int]]] = []

    def open(self, prompt: tuple[int, ...]) -> None:
        self.groups.append((len(self.input_ids), len(prompt), []))
        self.input_ids += prompt
        self.position_ids += range(len(prompt))

    def add(self, row: int, token_ids: tuple[int, ...]) -> None:
        start, prompt_length, lengths = self.groups[-1]
        first = len(self.input_ids)
        # The prompt's last state predicts the first token, each token's state the next one.
        self.predicts.append(start + prompt_length - 1)
        self.predicts += range(first, first + len(token_ids) - 1)
        self.input_ids += token_ids[:-1]
        self.position_ids += range(prompt_length, prompt_length + len(token_ids) - 1)
        lengths.append(len(token_ids) - 1)
        self.rows.append(row)
        self.completions.append(token_ids)

    def build(self, pad_token_id: int) -> Pack:
        targets, mask = _padded(self.completions, pad_token_id)
        return Pack(
            torch.tensor(self.rows),
            torch.tensor(self.input_ids),
            torch.tensor(self.position_ids),
            torch.tensor(self.predicts),
            targets,
            mask,
            tuple(Group(start, length, tuple(rows)) for start, length, rows in self.groups),
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
