"""Which completions of a rollout batch are probed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class ProbeRows:
    """The completions of one prompt that are probed.

    Args:
        prompt: Index of the prompt in the rollout batch.
        rows: Indices of the completions in the rollout batch, ascending.
        share: Their part of the group's sum of squared advantages.
    """

    prompt: int
    rows: tuple[int, ...]
    share: float


def choose_probe_rows(
    advantages: Float[Tensor, " B"],
    *,
    group_size: int,
    num_prompts: int,
    num_completions: int,
    rng: np.random.Generator,
    choice: Literal["contrast", "uniform"] = "contrast",
) -> list[ProbeRows]:
    """Draw prompts among those with signal, and some completions of each.

    ``contrast`` takes half of a group's completions from the top and half from the bottom by
    advantage, ties at random. It keeps most of the group's sum of squared advantages (``share``),
    and so most of what there is to see of the signal for each backward; but the sum over these
    rows is the gradient of a contrast between best and worst. It points where the group's gradient
    points only as far as gradient follows advantage, and it is not an unbiased estimate of it.
    ``uniform`` is: G / m times the sum over m rows drawn at random has the group's gradient as its
    mean, with more noise. The permutation null is exact for both, because rows are chosen by
    advantage alone.

    With fewer than G rows a prompt's noise weighs more against its signal than a whole group's
    does. Where noise within groups prevails, the noise scale of whole groups is about ``share``
    times the measured one; where the prompts themselves differ, it lies between the two.

    Args:
        advantages: [B], prompt by prompt.
        group_size: G.
        num_prompts: Most prompts to probe; fewer where fewer have signal.
        num_completions: Completions of each, at most G; the odd one is from the top.
        rng: Source of all chance.
        choice: How completions are chosen.

    Returns:
        One entry per prompt, ascending; none where no group has signal.

    Raises:
        ValueError: Not whole groups, fewer than 1 prompt or 2 completions, or an unknown choice.
    """
    if num_prompts < 1 or num_completions < 2:
        raise ValueError(
            f"num_prompts={num_prompts}, num_completions={num_completions}: probe at least 1 "
            "prompt and 2 of its completions."
        )
    if group_size < 2 or len(advantages) % group_size:
        raise ValueError(
            f"{len(advantages)} advantages do not make whole groups of group_size={group_size}."
        )
    if choice not in ("contrast", "uniform"):
        raise ValueError(f"choice={choice!r}: choose `contrast` or `uniform`.")
    groups = advantages.detach().double().cpu().numpy().reshape(-1, group_size)
    candidates = np.flatnonzero((groups != 0).any(axis=1))
    prompts = rng.permutation(candidates)[:num_prompts]
    num = min(num_completions, group_size)
    chosen = []
    for prompt in np.sort(prompts):
        values = groups[prompt]
        order = rng.permutation(group_size)
        if choice == "contrast":
            order = order[np.argsort(values[order], kind="stable")]  # ties stay shuffled
            order = np.concatenate([order[: num // 2], order[group_size - (num - num // 2) :]])
        picked = np.sort(order[:num])
        chosen.append(
            ProbeRows(
                int(prompt),
                tuple(int(prompt * group_size + row) for row in picked),
                float((values[picked] ** 2).sum() / (values**2).sum()),
            )
        )
    return chosen
