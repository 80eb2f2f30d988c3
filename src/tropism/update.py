"""One update on a scored rollout batch: forward, loss, backward, step, in micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tropism.forward.memory import give_back
from tropism.forward.trunk import Trunk
from tropism.measurements.step_metrics import Sums
from tropism.objective.kl import kl_estimate
from tropism.objective.losses import policy_loss, token_weights
from tropism.objective.mismatch import mismatch_weights
from tropism.objective.settings import Objective
from tropism.policy import Policy
from tropism.rollouts.collate import training_batches
from tropism.types import MicroBatch, Pack, RolloutBatch


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not a finite number; raised before the optimizer steps."""


def require_finite(loss: float, rows: Tensor) -> None:
    """Refuse a loss before its backward.

    Raises:
        NonFiniteError: It is no finite number.
    """
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss} (rows {rows.tolist()} of the rollout). No step was taken. Lower "
            "optimizer.learning_rate or max_grad_norm, and resume from the last checkpoint."
        )


@dataclass
class PreparedBatch:
    """A rollout batch as micro-batches, with what stays fixed over its updates.

    Lists hold one [M, T] tensor for each micro-batch.

    Args:
        micro_batches: Only rows that can have a gradient.
        weights: [B] weight of each token of a row, from *all* rows of the rollout.
        advantages: [B].
        num_tokens: Tokens of all rows of the micro-batches.
        sampler_logprobs: The engine's.
        old_logprobs: The trainer's before any update, filled by the first pass.
        reference_logprobs: Empty where beta is 0.
        has_policy_gradient: Tokens that the policy term acts on; empty where it is all of them.
        trunks: Where every pass starts.
    """

    micro_batches: list[MicroBatch | Pack]
    weights: Tensor
    advantages: Tensor
    num_tokens: int
    sampler_logprobs: list[Tensor]
    old_logprobs: list[Tensor] = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)
    has_policy_gradient: list[Tensor] = field(default_factory=list)
    trunks: list[Trunk | None] = field(default_factory=list)


def prepare(
    batch: RolloutBatch,
    policy: Policy,
    objective: Objective,
    *,
    max_completion_length: int,
    temperature: float,
    max_tokens: int,
    lowest_trained: int = 0,
) -> PreparedBatch:
    """Choose the rows to train on, collate them, and run the passes that need no gradient.

    Rows whose advantage is 0 have no gradient unless a KL term or an entropy bonus pulls on them;
    they are left out of every forward, while all denominators still count them. Truncated rows
    that are masked leave the denominators too.

    Args:
        lowest_trained: Layers below it do not train; they run once where there are several passes.
    """
    lengths, counted = _lengths_and_counted(batch, objective)
    keep = counted & (batch.advantages != 0)
    if objective.beta > 0 or objective.entropy_bonus > 0:
        keep = counted
    device = policy.device
    parts = [
        part.to(device)
        for part in training_batches(
            batch.rollouts,
            keep=keep,
            max_tokens=max_tokens,
            pad_token_id=policy.pad_token_id,
            can_pack=policy.can_pack,
        )
    ]
    weights = row_weights(batch, objective, max_completion_length=max_completion_length)
    prepared = PreparedBatch(
        parts,
        weights.to(device),
        batch.advantages.to(device),
        int(lengths[keep].sum()),
        [_sampler_logprobs(part, batch).to(device) for part in parts],
    )
    prepared.trunks = _trunks(parts, policy, objective, lowest_trained)
    with torch.no_grad():
        if objective.entropy_top_fraction < 1:
            _choose_tokens(prepared, policy, objective, temperature)
        if objective.beta > 0:
            with policy.reference():
                for part, trunk in zip(parts, prepared.trunks, strict=True):
                    logprobs, _ = policy.completion_logprobs(
                        part, temperature=temperature, trunk=trunk
                    )
                    prepared.reference_logprobs.append(logprobs)
    return prepared


def _trunks(
    parts: list[MicroBatch | Pack], policy: Policy, objective: Objective, lowest_trained: int
) -> list[Trunk | None]:
    """The layers below all that differs between the passes, where there are several passes."""
    num_passes = objective.num_iterations + (objective.entropy_top_fraction < 1)
    depth = lowest_trained
    if objective.beta > 0 and depth > 0:
        num_passes += 1
        depth = min(depth, policy.lowest_layer(policy.unlike_reference()))
    if num_passes == 1 or depth == 0:
        return [None] * len(parts)
    return [policy.trunk(part, depth) for part in parts]


def row_weights(batch: RolloutBatch, objective: Objective, *, max_completion_length: int) -> Tensor:
    """[B] weight in the loss of each token of a row, from all rows of the rollout."""
    lengths, counted = _lengths_and_counted(batch, objective)
    return token_weights(
        lengths,
        loss=objective.loss,
        group_size=batch.group_size,
        max_completion_length=max_completion_length,
        counted=counted,
    )


def _lengths_and_counted(batch: RolloutBatch, objective: Objective) -> tuple[Tensor, Tensor]:
    """[B] tokens of each completion, and whether it counts (not truncated and masked)."""
    completions = batch.completions
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    counted = torch.tensor(
        [not objective.mask_truncated or c.finish_reason == "stop" for c in completions]
    )
    return lengths, counted


def _sampler_logprobs(part: MicroBatch | Pack, batch: RolloutBatch) -> Tensor:
    completions = batch.completions
    rows = torch.zeros(part.mask.shape)
    for i, row in enumerate(part.rows.tolist()):
        logprobs = completions[row].sampler_logprobs
        rows[i, : len(logprobs)] = logprobs
    return rows


def _choose_tokens(
    prepared: PreparedBatch, policy: Policy, objective: Objective, temperature: float
) -> None:
    """Find the tokens of the highest entropy over the whole rollout batch, in a pass of its own."""
    entropies = []
    for part, trunk in zip(prepared.micro_batches, prepared.trunks, strict=True):
        logprobs, entropy = policy.completion_logprobs(part, temperature=temperature, trunk=trunk)
        prepared.old_logprobs.append(logprobs)
        entropies.append(entropy)
    if not entropies:
        return
    masks = [part.mask for part in prepared.micro_batches]
    every = torch.cat([e[mask] for e, mask in zip(entropies, masks, strict=True)])
    num = max(1, round(objective.entropy_top_fraction * len(every)))
    threshold = every.topk(num).values[-1]
    prepared.has_policy_gradient = [entropy >= threshold for entropy in entropies]


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
        logprobs, entropy = policy.completion_logprobs(
            part,
            temperature=temperature,
            should_train_entropy=objective.entropy_bonus > 0,
            trunk=prepared.trunks[i],
        )
        if is_first:
            prepared.old_logprobs.append(logprobs.detach())
        term = policy_loss(
            logprobs,
            old_logprobs=prepared.old_logprobs[i],
            advantages=prepared.advantages[part.rows],
            mask=part.mask,
            loss=objective.loss,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
            sapo_temperatures=objective.sapo_temperatures,
        )
        low, high = objective.mismatch_range
        mismatch = mismatch_weights(
            prepared.old_logprobs[i],
            sampler_logprobs=prepared.sampler_logprobs[i],
            mask=part.mask,
            correction=objective.mismatch,
            low=low,
            high=high,
        )
        token_loss = term.loss * mismatch.weights
        if prepared.has_policy_gradient:
            token_loss = token_loss * prepared.has_policy_gradient[i]
        if prepared.reference_logprobs:
            kl = kl_estimate(
                logprobs,
                reference_logprobs=prepared.reference_logprobs[i],
                estimator=objective.kl,
            )
            token_loss = token_loss + objective.beta * kl
            sums.kl += float((kl.detach() * part.mask).sum())
        loss = (token_loss * prepared.weights[part.rows, None] * part.mask).sum()
        if objective.entropy_bonus > 0:
            mean_entropy = (entropy * part.mask).sum() / prepared.num_tokens
            loss = loss - objective.entropy_bonus * mean_entropy
        value = float(loss.detach())
        require_finite(value, part.rows)
        backward(loss)
        if policy.device.type == "cpu" and i + 1 < len(prepared.micro_batches):
            give_back()
        gap = (logprobs.detach() - prepared.sampler_logprobs[i]).abs()
        sums.loss += value
        sums.tokens += int(part.mask.sum())
        sums.entropy += float((entropy.detach() * part.mask).sum())
        sums.sampler_gap += float((gap * part.mask).sum())
        sums.sampler_gap_max = max(sums.sampler_gap_max, float((gap * part.mask).max()))
        sums.ratio += float((mismatch.ratio * part.mask).sum())
        sums.ratio_squared += float((mismatch.ratio.square() * part.mask).sum())
        sums.corrected += int((mismatch.is_corrected & part.mask).sum())
        sums.clipped_low += int((term.clipped_low & part.mask).sum())
        sums.clipped_high += int((term.clipped_high & part.mask).sum())
    return sums
