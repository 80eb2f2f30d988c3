"""From sampled completions to the tensors of a training forward.

Sequences are padded on the *right*: with causal attention no real token ever sees a pad, so no
mask and no position shift is needed, for any decoder family. Rows are sorted by length and cut
into micro-batches by a token budget, so that little of a forward is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tropism.types import Rollout


@dataclass(frozen=True)
class TokenSequence:
    """One completion behind its prompt."""

    row: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a rollout batch, ready for one forward.

    Args:
        rows: [M] indices into the rollout batch.
        input_ids: [M, S] prompt + completion, right-padded.
        positions: [M, T] index into S of the state that predicts each completion token.
        targets: [M, T] completion tokens, right-padded.
        mask: [M, T] bool, True on completion tokens (EOS included).
    """

    rows: Tensor
    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on ``device``."""
        return MicroBatch(
            self.rows.to(device),
            self.input_ids.to(device),
            self.positions.to(device),
            self.targets.to(device),
            self.mask.to(device),
        )


def sequences(rollouts: Sequence[Rollout], *, keep: Tensor) -> list[TokenSequence]:
    """The rows of a rollout batch for which ``keep`` [B] is True."""
    rows = [
        TokenSequence(row, rollout.prompt_token_ids, completion.token_ids)
        for row, (rollout, completion) in enumerate(
            (rollout, completion) for rollout in rollouts for completion in rollout.completions
        )
    ]
    return [sequence for sequence in rows if keep[sequence.row]]


def micro_batches(
    sequences: Sequence[TokenSequence], *, max_tokens: int, pad_token_id: int
) -> Iterator[MicroBatch]:
    """Cut sequences, longest first, into micro-batches of at most ``max_tokens`` padded tokens.

    A single sequence longer than the budget still gets a micro-batch of its own.
    """
    ordered = sorted(sequences, key=lambda sequence: (-len(sequence), sequence.row))
    start = 0
    while start < len(ordered):
        size = max(1, max_tokens // len(ordered[start]))
        yield _collate(ordered[start : start + size], pad_token_id)
        start += size


def _collate(sequences: Sequence[TokenSequence], pad_token_id: int) -> MicroBatch:
    num_positions = max(len(sequence) for sequence in sequences)
    num_targets = max(len(sequence.completion) for sequence in sequences)
    input_ids = torch.full((len(sequences), num_positions), pad_token_id)
    targets = torch.full((len(sequences), num_targets), pad_token_id)
    positions = torch.zeros_like(targets)
    mask = torch.zeros_like(targets, dtype=torch.bool)
    for i, sequence in enumerate(sequences):
        length = len(sequence.completion)
        input_ids[i, : len(sequence)] = torch.tensor(sequence.prompt + sequence.completion)
        targets[i, :length] = torch.tensor(sequence.completion)
        # The state at position p predicts the token at p + 1.
        first = len(sequence.prompt) - 1
        positions[i, :length] = torch.arange(first, first + length)
        mask[i, :length] = True
    rows = torch.tensor([sequence.row for sequence in sequences])
    return MicroBatch(rows, input_ids, positions, targets, mask)
