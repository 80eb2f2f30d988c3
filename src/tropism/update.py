"""One update on a scored rollout batch: forward, loss, backward, step, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tropism.measurements.step_metrics import Sums
from tropism.objective.kl import kl_k3
from tropism.objective.losses import clipped_surrogate, token_weights
from tropism.objective.settings import Objective
from tropism.policy import Policy
from tropism.rollouts.collate import micro_batches
from tropism.types import MicroBatch, RolloutBatch


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a finite number; raised before the optimizer steps."""


@dataclass
class PreparedBatch:
    """A rollout batch as micro-batches, with what stays fixed over its updates.

    Args:
        micro_batches: Only rows that can have a gradient.
        weights: [B] weight of each token of a row, from *all* rows of the rollout.
        advantages: [B].
        sampler_logprobs: one [M, T] a micro-batch.
        old_logprobs: one [M, T] a micro-batch, filled by the first pass.
        reference_logprobs: likewise, empty where beta is 0.
    """

    micro_batches: list[MicroBatch]
    weights: Tensor
    advantages: Tensor
    sampler_logprobs: list[Tensor]
    old_logprobs: list[Tensor] = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)


def prepare(
    batch: RolloutBatch,
    policy: Policy,
    objective: Objective,
    *,
    max_completion_length: int,
    temperature: float,
    max_tokens: int,
) -> PreparedBatch:
    """Choose the rows to train on, collate them, and run the reference pass if there is one.

    Rows whose advantage is 0 have no gradient unless a KL term pulls on them; they are left out
    of every forward, while all denominators still count them.
    """
    completions = batch.completions
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    keep = batch.advantages != 0
    if objective.beta > 0:
        keep = torch.ones_like(keep)
    device = policy.device
    parts = [
        part.to(device)
        for part in micro_batches(
            batch.rollouts,
            keep=keep,
            max_tokens=max_tokens,
            pad_token_id=policy.pad_token_id,
        )
    ]
    sampler = []
    for part in parts:
        rows = torch.zeros(part.mask.shape)
        for i, row in enumerate(part.rows.tolist()):
            rows[i, : lengths[row]] = completions[row].sampler_logprobs
        sampler.append(rows.to(device))
    prepared = PreparedBatch(
        parts,
        token_weights(lengths, loss=objective.loss, max_completion_length=max_completion_length).to(
            device
        ),
        batch.advantages.to(device),
        sampler,
    )
    if objective.beta > 0:
        with torch.no_grad(), policy.starting():
            for part in parts:
                logprobs, _ = policy.completion_logprobs(part, temperature=temperature)
                prepared.reference_logprobs.append(logprobs)
    return prepared


def accumulate_gradients(
    prepared: PreparedBatch,
    policy: Policy,
    objective: Objective,
    *,
    temperature: float,
    backward: Callable[[Tensor], None],
) -> Sums:
    """One pass over the micro-batches; gradients are left in the trainable parameters.

    Raises:
        NonFiniteError: The loss of a micro-batch is not finite (no optimizer step was taken).
    """
    sums = Sums()
    is_first = not prepared.old_logprobs
    for i, part in enumerate(prepared.micro_batches):
        logprobs, entropy = policy.completion_logprobs(part, temperature=temperature)
        if is_first:
            prepared.old_logprobs.append(logprobs.detach())
        surrogate = clipped_surrogate(
            logprobs,
            old_logprobs=prepared.old_logprobs[i],
            advantages=prepared.advantages[part.rows],
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
        )
        token_loss = surrogate.loss
        if prepared.reference_logprobs:
            kl = kl_k3(logprobs, reference_logprobs=prepared.reference_logprobs[i])
            token_loss = token_loss + objective.beta * kl
            sums.kl += float((kl.detach() * part.mask).sum())
        weights = prepared.weights[part.rows, None] * part.mask  # (M, T)
        loss = (token_loss * weights).sum()
        value = float(loss.detach())
        if not torch.isfinite(loss.detach()):
            raise NonFiniteError(
                f"the loss is {value} (rows {part.rows.tolist()} of the rollout). No step was "
                "taken. Lower optimizer.learning_rate or max_grad_norm, and resume from the last "
                "checkpoint."
            )
        backward(loss)
        gap = (logprobs.detach() - prepared.sampler_logprobs[i]).abs()
        sums.loss += value
        sums.tokens += int(part.mask.sum())
        sums.entropy += float((entropy * part.mask).sum())
        sums.sampler_gap += float((gap * part.mask).sum())
        sums.clipped_low += int((surrogate.clipped_low & part.mask).sum())
        sums.clipped_high += int((surrogate.clipped_high & part.mask).sum())
    return sums
