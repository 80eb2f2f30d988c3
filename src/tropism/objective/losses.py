"""The clipped surrogate, and the weight with which each token enters the loss.

A loss here is ``(token_loss * token_weights).sum()``: the token loss is the same for the whole
family, and the losses differ only in their denominators,

    grpo     each completion's mean over its tokens, then the mean over completions (2402.03300)
    dapo     the mean over all completion tokens of the rollout batch              (2503.14476)
    dr_grpo  the sum over tokens / (B * completion limit), a constant               (2503.20783)

Weights are made once for the whole rollout batch, so that micro-batches, dropped zero-advantage
rows and accumulation cannot change a denominator: the parts simply add up.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Loss = Literal["grpo", "dapo", "dr_grpo"]


def token_weights(
    lengths: Float[Tensor, " B"] | Tensor, *, loss: Loss, max_completion_length: int
) -> Float[Tensor, " B"]:
    """Weight of every token of each completion; the same for all tokens of one completion.

    Args:
        lengths: [B] completion tokens, EOS included, of *all* B completions of the rollout.
        loss: Whose denominator.
        max_completion_length: The completion limit in tokens, used by ``dr_grpo``.
    """
    lengths = lengths.to(torch.float32)
    if loss == "grpo":
        return 1 / (lengths.clamp(min=1) * len(lengths))
    if loss == "dapo":
        return torch.full_like(lengths, 1 / max(lengths.sum().item(), 1))
    return torch.full_like(lengths, 1 / (len(lengths) * max_completion_length))


class TokenLoss(NamedTuple):
    """Loss of each token, and which tokens the clip has cut off from any gradient."""

    loss: Float[Tensor, "B T"]
    clipped_low: Tensor  # [B, T] bool: ratio below 1 - clip_low with a negative advantage
    clipped_high: Tensor  # [B, T] bool: ratio above 1 + clip_high with a positive advantage


def clipped_surrogate(
    policy_logprobs: Float[Tensor, "B T"],
    *,
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, " B"],
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) for each token.

    ``clip_high > clip_low`` is DAPO's clip-higher. The ratio is policy / old policy, so it is 1,
    and the gradient the plain policy gradient, on the first pass over a rollout batch.
    """
    ratio = (policy_logprobs - old_logprobs).exp()
    advantage = advantages[:, None]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    return TokenLoss(
        loss,
        (ratio < 1 - clip_low) & (advantage < 0),
        (ratio > 1 + clip_high) & (advantage > 0),
    )
