"""The policy term of each loss, and the weight with which each token enters it.

A loss here is ``(token_loss * token_weights).sum()``.

    loss     token loss                                       weight of a token
    grpo     clipped surrogate                                1 / (B * tokens of its completion)
    bnpo     clipped surrogate                                1 / (P * tokens of its group)
    dapo     clipped surrogate                                1 / tokens of the rollout batch
    dr_grpo  clipped surrogate                                1 / (B * completion limit)
    gspo     clipped surrogate, the ratio a completion's      as grpo
    cispo    capped ratio, detached, times log-probability    as dapo
    sapo     sigmoid gate in place of the clip                as grpo

Sources: 2402.03300 (GRPO), 2503.14476 (DAPO), 2503.20783 (Dr. GRPO), 2507.18071 (GSPO),
2506.13585 (CISPO), 2511.20347 (SAPO), 1912.09729 (dual clip). BNPO normalises by the tokens of a
*local* batch; here that is the group, so that it does not depend on how memory cuts the batch.

Weights are made once for the whole rollout batch, so that micro-batches, dropped zero-advantage
rows and accumulation cannot change a denominator: the parts simply add up.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Loss = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo"]


def token_weights(
    lengths: Int[Tensor, " B"],
    *,
    loss: Loss,
    group_size: int,
    max_completion_length: int,
    counted: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Weight of every token of each completion; the same for all tokens of one completion.

    Args:
        lengths: [B] completion tokens, EOS included, of *all* B completions of the rollout.
        loss: Whose denominator.
        group_size: G.
        max_completion_length: The completion limit in tokens, used by ``dr_grpo``.
        counted: [B] False for completions that are masked out altogether (truncated ones): their
            weight is 0 and no denominator counts them, so that they do not shrink the gradient.
    """
    mask = torch.ones_like(lengths) if counted is None else counted
    lengths, mask = lengths.to(torch.float32), mask.to(torch.float32)
    num_rows = mask.sum().clamp(min=1)
    if loss in {"grpo", "gspo", "sapo"}:
        weights = 1 / (lengths.clamp(min=1) * num_rows)
    elif loss in {"dapo", "cispo"}:
        weights = torch.ones_like(lengths) / (lengths * mask).sum().clamp(min=1)
    elif loss == "bnpo":
        tokens = (lengths * mask).view(-1, group_size).sum(dim=1)  # (P,)
        num_groups = (tokens > 0).sum().clamp(min=1)
        weights = (1 / (tokens.clamp(min=1) * num_groups)).repeat_interleave(group_size)
    else:
        weights = torch.ones_like(lengths) / (num_rows * max_completion_length)
    return weights * mask


class TokenLoss(NamedTuple):
    """Loss of each token, and which tokens a clip has cut off from any gradient."""

    loss: Float[Tensor, "B T"]
    clipped_low: Bool[Tensor, "B T"]
    clipped_high: Bool[Tensor, "B T"]


def policy_loss(
    policy_logprobs: Float[Tensor, "B T"],
    *,
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    loss: Loss,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
) -> TokenLoss:
    """The policy term of ``loss`` for each token (weights and KL come after it).

    Args:
        policy_logprobs: [B, T], differentiable.
        old_logprobs: [B, T] before the first update on this rollout batch.
        advantages: [B].
        mask: [B, T] completion tokens; ``gspo`` takes the mean log-ratio over them.
        loss: Which.
        clip_low: Ratios are clipped below 1 - clip_low.
        clip_high: And above 1 + clip_high (``cispo``: the cap of its weight).
        dual_clip: Upper bound of the ratio where the advantage is negative; null for none.
        sapo_temperatures: Steepness of SAPO's gate for positive and for other advantages.
    """
    log_ratio = policy_logprobs - old_logprobs
    advantage = advantages[:, None]
    if loss == "gspo":
        length = mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = ((log_ratio * mask).sum(dim=1, keepdim=True) / length).expand_as(log_ratio)
    ratio = log_ratio.exp()
    too_low = (ratio < 1 - clip_low) & (advantage < 0)
    too_high = (ratio > 1 + clip_high) & (advantage > 0)
    none = torch.zeros_like(too_high)
    if loss == "cispo":
        weight = ratio.clamp(max=1 + clip_high).detach()
        # Every token keeps its gradient here; the counts say where the cap was reached.
        return TokenLoss(-weight * advantage * policy_logprobs, none, too_high)
    if loss == "sapo":
        positive, negative = sapo_temperatures
        temperature = torch.where(advantage > 0, positive, negative)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return TokenLoss(-gate * advantage, none, none)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    return TokenLoss(-torch.minimum(bounded * advantage, clipped * advantage), too_low, too_high)
