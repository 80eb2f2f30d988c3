"""Corrects for a sampler whose policy is not quite the trainer's.

Weights by the ratio trainer / sampler at the moment of sampling, truncated (TIS) or masked where
it leaves the allowed range, by token or by completion (2510.18927 and the TRL and verl options).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def mismatch_weights(
    old_logprobs: Float[Tensor, "B T"],
    *,
    sampler_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    correction: Correction,
    low: float | None,
    high: float | None,
) -> Float[Tensor, "B T"]:
    """Weight of each token, without gradient.

    Args:
        old_logprobs: [B, T] the trainer's, before any update on this rollout batch.
        sampler_logprobs: [B, T] the engine's, when it drew the tokens.
        mask: [B, T] completion tokens.
        correction: ``truncate`` clamps the ratio to [low, high], ``mask`` puts 0 outside of it;
            ``sequence`` takes the ratio of the whole completion for each of its tokens.
        low: Lower bound, None for none.
        high: Upper bound, None for none.
    """
    if correction == "none":
        return torch.ones_like(old_logprobs)
    log_ratio = ((old_logprobs - sampler_logprobs) * mask).detach()
    if correction.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.exp()
    low = 0.0 if low is None else low
    high = float("inf") if high is None else high
    if correction.endswith("truncate"):
        return ratio.clamp(low, high)
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
