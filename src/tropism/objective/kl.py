"""Estimates of KL(policy || reference) from sampled tokens.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def kl_k3(
    policy_logprobs: Float[Tensor, "B T"], *, reference_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """k3 = r - 1 - log r with r = reference / policy: unbiased under the policy, never negative."""
    log_ratio = reference_logprobs - policy_logprobs
    return log_ratio.exp() - 1 - log_ratio
