"""Corrects for a sampler whose policy is not quite the trainer's.

Weights by the ratio trainer / sampler at the moment of sampling, truncated (TIS) or masked where
it leaves the allowed range, by token or by completion (2510.18927 and the TRL and verl options).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Mismatch(NamedTuple):
    """What each token counts for, without gradient.

    Args:
        weights: [B, T] weight in the loss.
        ratio: [B, T] trainer / sampler, of the token or of its whole completion; 1 outside of the
            mask.
        is_corrected: [B, T] where the ratio left its range, and was clamped or masked.
    """

    weights: Float[Tensor, "B T"]
    ratio: Float[Tensor, "B T"]
    is_corrected: Bool[Tensor, "B T"]


def mismatch_weights(
    old_logprobs: Float[Tensor, "B T"],
    *,
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    correction: Correction,
    low: float | None,
    high: float | None,
) -> Mismatch:
    """Weigh tokens by the trainer's policy over the sampler's.

    Args:
        old_logprobs: [B, T] the trainer's, before any update on this rollout batch.
        sampler_logprobs: [B, T] the engine's, when it drew the tokens.
        mask: [B, T] completion tokens.
        correction: ``truncate`` clamps the ratio to [low, high], ``mask`` puts 0 outside of it;
            ``sequence`` takes the ratio of the whole completion for each of its tokens; ``none``
            weighs all by 1.
        low: Lower bound, None for none.
        high: Upper bound, None for none.
    """
    log_ratio = ((old_logprobs - sampler_logprobs) * mask).detach()
    if correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.exp()
    low = 0.0 if low is None else low
    high = float("inf") if high is None else high
    is_outside = (ratio < low) | (ratio > high)
    if correction == "none":
        return Mismatch(torch.ones_like(ratio), ratio, torch.zeros_like(is_outside))
    if correction.endswith("truncate"):
        return Mismatch(ratio.clamp(low, high), ratio, is_outside)
    return Mismatch(torch.where(is_outside, 0.0, ratio), ratio, is_outside)
