"""Group-relative advantages.

GRPO (2402.03300, eq. 3) compares each completion with the others of its own prompt. ``scale``
chooses what the difference is divided by: the group's standard deviation (GRPO), or nothing
(Dr. GRPO, 2503.20783: dividing by it favours prompts that are almost solved or almost lost).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scale = Literal["group", "none"]

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does: keeps an almost constant group finite."""

EQUAL = 1e-6
"""Rewards of a group within this of each other (relative to those above 1) count as equal."""


class Advantages(NamedTuple):
    """Advantages with what was known about each group while making them."""

    values: Float[Tensor, " B"]
    group_std: Float[Tensor, " P"]
    zero_variance: Bool[Tensor, " P"]


def group_advantages(
    rewards: Float[Tensor, " B"], *, group_size: int, scale: Scale = "group"
) -> Advantages:
    """Centre each group's rewards and scale them.

    Args:
        rewards: [B] in row order, prompt by prompt.
        group_size: G; the standard deviation is the unbiased one, over G - 1.
        scale: ``group`` divides by the group's standard deviation + 1e-4, ``none`` by nothing.

    Returns:
        Advantages [B], standard deviation within each group [P], and which groups [P] have
        equal rewards throughout: their advantages are exactly 0.

    Raises:
        ValueError: G < 2, or B is not a multiple of it.
    """
    if group_size < 2:
        raise ValueError(f"group_size={group_size}: a group needs at least 2 completions.")
    if rewards.numel() % group_size:
        raise ValueError(
            f"{rewards.numel()} rewards do not make whole groups of group_size={group_size}."
        )
    groups = rewards.view(-1, group_size)  # (P, G)
    spread = groups.amax(dim=1) - groups.amin(dim=1)
    # Sums that differ by rounding alone are equal: dividing by their spread would make it signal.
    zero_variance = spread <= EQUAL * groups.abs().amax(dim=1).clamp(min=1)  # (P,)
    std = torch.where(zero_variance, 0.0, groups.std(dim=1))  # (P,)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (std[:, None] + EPSILON)
    # A mean of equal floats can differ from them by rounding; no signal must mean exactly none.
    values = torch.where(zero_variance[:, None], 0.0, centred)
    return Advantages(values.reshape(-1), std, zero_variance)
