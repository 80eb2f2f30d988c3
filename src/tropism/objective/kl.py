"""Estimates of KL(policy || reference) from sampled tokens.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

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
