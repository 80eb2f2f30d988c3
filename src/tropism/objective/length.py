"""A penalty on completions that near their limit."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def soft_overlong(
    lengths: Int[Tensor, " B"], *, max_completion_length: int, buffer: int
) -> Float[Tensor, " B"]:
    """DAPO's soft overlong punishment (2503.14476, eq. 13), added to the reward.

    0 up to ``max_completion_length - buffer`` tokens, then linearly down to -1 at the limit.
    """
    start = max_completion_length - buffer
    excess = (lengths.to(torch.float32) - start) / buffer
    return -excess.clamp(0.0, 1.0)
