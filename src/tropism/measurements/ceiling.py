"""How much KL could any step sizes by linear have saved, at the same gain? From a run's records.

Steps of sizes s gain g.s and cost a KL of 1/2 s^T F s (``gain.py``), so they pay for the gain of
uniform steps with

    (s^T F s / (g.s)^2) / (1^T F 1 / (g.1)^2)

of uniform's KL, whatever their common size. Sizes are proposed from half of the prompts and judged
on the other half: on the half that they were made from, any number of free sizes looks good.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Proposal = Callable[[Vector, Vector, np.random.Generator], Vector]
"""(g [L], F [L, L], chance) -> s [L]."""


def kl_ratio(steps: Vector, gain: Vector, curvature: Vector) -> float:
    """KL at the gain of uniform steps, over uniform's.

    Args:
        steps: s, [L].
        gain: g, [L].
        curvature: F, [L, L].
    """
    uniform = np.ones_like(steps)
    cost = (steps @ curvature @ steps) / (gain @ steps) ** 2
    return float(cost / ((uniform @ curvature @ uniform) / (gain @ uniform) ** 2))


def ridge(strength: float) -> Proposal:
    """s = (F + strength * mean diagonal * 1)^-1 g: the best sizes where F is known that badly."""

    def propose(gain: Vector, curvature: Vector, rng: np.random.Generator) -> Vector:
        mean = np.trace(curvature) / len(gain)
        return np.linalg.solve(curvature + strength * mean * np.eye(len(gain)), gain)

    return propose


def by_gain(gain: Vector, curvature: Vector, rng: np.random.Generator) -> Vector:
    """s in proportion to the gain, cut where it is negative."""
    return np.maximum(gain, 0.0)


def shuffled(modules: Sequence[str]) -> Proposal:
    """``by_gain``, dealt out anew within each kind of module."""
    kinds = np.asarray(modules)

    def propose(gain: Vector, curvature: Vector, rng: np.random.Generator) -> Vector:
        steps = by_gain(gain, curvature, rng)
        for kind in np.unique(kinds):
            own = np.flatnonzero(kinds == kind)
            steps[own] = steps[rng.permutation(own)]
        return steps

    return propose


def only(chosen: Sequence[bool]) -> Proposal:
    """1 for the chosen linears, 0 for others."""
    steps = np.asarray(chosen, dtype=np.float64)
    return lambda gain, curvature, rng: steps


def shared(changes: Vector) -> float:
    """Part of the KL that is cross terms between linears.

    Args:
        changes: d, [N, L].
    """
    return float(1.0 - np.square(changes).sum() / np.square(changes.sum(axis=1)).sum())


def ceiling(
    moves: pd.DataFrame,
    proposals: Mapping[str, Proposal],
    *,
    num_splits: int = 40,
    rng: np.random.Generator,
) -> pd.DataFrame:
    """Every proposal's KL ratio on prompts that it has not seen.

    Args:
        moves: Rows of the ``moves`` table of one reading: ``prompt``, ``advantage``, ``changes``.
        proposals: By name.
        num_splits: Random halves to average over.
        rng: Draws them.

    Returns:
        Columns steps (the proposal's name), kl_ratio (geometric mean over the splits), shared_kl.
    """
    changes = np.array(moves["changes"].to_list(), dtype=np.float64)
    advantages = moves["advantage"].to_numpy(dtype=np.float64)
    prompts = moves["prompt"].to_numpy()
    every = np.unique(prompts)
    logs: dict[str, list[float]] = {name: [] for name in proposals}
    for _ in range(num_splits):
        is_seen = np.isin(prompts, rng.permutation(every)[: len(every) // 2])
        seen, unseen = (_sums(changes[rows], advantages[rows]) for rows in (is_seen, ~is_seen))
        for name, propose in proposals.items():
            logs[name].append(np.log(kl_ratio(propose(*seen, rng), *unseen)))
    return pd.DataFrame(
        {
            "steps": list(logs),
            "kl_ratio": [float(np.exp(np.mean(values))) for values in logs.values()],
            "shared_kl": shared(changes),
        }
    )


def _sums(changes: Vector, advantages: Vector) -> tuple[Vector, Vector]:
    """g and F, up to factors that a ratio does not see."""
    return advantages @ changes, changes.T @ changes
