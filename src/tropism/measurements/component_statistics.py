"""What one reward component did in a rollout."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def component_statistics(scores: Float[Tensor, " B"], group_size: int) -> dict[str, float | None]:
    """Mean of one component, and the mean over groups of its standard deviation within a group.

    Args:
        scores: [B], NaN where the component abstained; those are left out of both.
        group_size: G; a group with fewer than two scores has no deviation.
    """
    groups = [group[~group.isnan()] for group in scores.view(-1, group_size)]
    deviations = [group.std() for group in groups if len(group) > 1]
    mean = float(torch.cat(groups).mean())  # NaN where all abstained
    return {
        "mean": None if math.isnan(mean) else mean,
        "group_std": float(torch.stack(deviations).mean()) if deviations else None,
    }
