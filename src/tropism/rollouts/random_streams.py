"""Randomness keyed by what is sampled, not by when or beside what.

Each completion has its own stream of uniforms, a pure function of (seed, rollout, prompt,
sample). A token is drawn by inverting the distribution at the next uniform, so that a completion
is the same whatever the batch, the rank or the number of engine calls.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def uniforms(*, seed: int, rollout: int, prompt_id: str, sample: int, num: int) -> Tensor:
    """[num] fp32 uniforms in [0, 1), the stream of one completion."""
    key = _key(seed, rollout, prompt_id, sample)
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return torch.from_numpy(generator.random(num, dtype=np.float32))


def request_seed(*, seed: int, rollout: int, prompt_id: str, sample: int) -> int:
    """The seed of one completion, in [0, 2^63), for an engine that draws by itself."""
    return int.from_bytes(_key(seed, rollout, prompt_id, sample)[:8], "little") >> 1


def _key(seed: int, rollout: int, prompt_id: str, sample: int) -> bytes:
    return hashlib.sha256(f"{seed}|{rollout}|{sample}|{prompt_id}".encode()).digest()


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Tokens at the given quantiles of each row's distribution.

    Args:
        logprobs: [B, V] fp32, normalised.
        uniform: [B] in [0, 1).

    Returns:
        [B] token ids: the first whose cumulative probability exceeds the uniform. A token of
        probability 0 is never drawn.
    """
    cumulative = logprobs.exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    # Scaled by the total, which rounding leaves a little off 1, and kept below it, so that some
    # bin is always reached: then it is the last one that has any probability.
    quantile = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, quantile[:, None], right=True).squeeze(1)
