"""KL(policy || reference): estimated from sampled tokens, or summed over the vocabulary.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    policy_logprobs: Float[Tensor, "B T"],
    *,
    reference_logprobs: Float[Tensor, "B T"],
    estimator: Estimator = "k3",
) -> Float[Tensor, "B T"]:
    """Per-token estimate, with r = reference / policy.

    ``k1`` = -log r: unbiased, often negative; its gradient in a loss has expectation 0, so it
    regularises only through its variance. ``k2`` = (log r)^2 / 2: biased, its gradient is the
    KL's. ``k3`` = r - 1 - log r: unbiased and never negative.
    """
    log_ratio = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return log_ratio.exp() - 1 - log_ratio


@torch.no_grad()
def full_kl(
    hidden: Float[Tensor, "N D"],
    other_hidden: Float[Tensor, "N D"],
    *,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    chunk_tokens: int = 64,
) -> Float[Tensor, " N"]:
    """KL(p || q) in nats at each position, exactly, of two policies with the same head.

    Args:
        hidden: Last hidden states under p.
        other_hidden: The same positions under q.
        head: D -> V, as the model applies it.
        temperature: Of the softmax, which is in fp32.
        chunk_tokens: Positions whose logits exist at the same time.
    """
    parts = []
    for one, other in zip(
        hidden.split(chunk_tokens), other_hidden.split(chunk_tokens), strict=True
    ):
        log_p = (head(one).float() / temperature).log_softmax(dim=-1)  # (N, V)
        log_q = (head(other).float() / temperature).log_softmax(dim=-1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
