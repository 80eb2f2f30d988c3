"""Weights of the reward components, what abstaining means, and scorers for users' own rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tropism.scoring import RewardError, component_names, component_tensors, score_completions
from tropism.tasks.base import Task

__all__ = [
    "RewardError",
    "Rewards",
    "component_tensors",
    "contains",
    "exact_match",
    "score_completions",
]


class Rewards:
    """Weights of the components, settable while training runs.

    Args:
        weights: ``component`` or ``task.component`` (which wins) -> weight; None means 1 for all.
            Each component of each task needs one: 0 keeps it as a measurement.
        tasks: All tasks of the run, by name.

    Raises:
        ValueError: A weight that belongs to no component, is missing, or is not finite.
    """

    def __init__(self, weights: Mapping[str, float] | None, tasks: Mapping[str, Task]) -> None:
        names = component_names(tasks)
        if weights is None:
            weights = dict.fromkeys(names.values(), 1.0)
        known = {component for _, component in names}
        known |= {f"{task}.{component}" for task, component in names}
        if unknown := sorted(weights.keys() - known):
            raise ValueError(
                f"reward_weights has {unknown}, which no task gives; choose from {sorted(known)}."
            )
        self._weights: dict[str, float] = {}
        self._aliases = {f"{task}.{component}": name for (task, component), name in names.items()}
        missing = []
        for (task, component), name in names.items():
            weight = weights.get(f"{task}.{component}", weights.get(component))
            if weight is None:
                missing.append(f"{task}.{component}")
            else:
                self._weights[name] = _finite(name, weight)
        if missing:
            raise ValueError(
                f"reward_weights lacks {missing}; give each a weight (0 to only measure it), or "
                "leave reward_weights out for 1 each."
            )

    @property
    def weights(self) -> Mapping[str, float]:
        """Name of a component in a batch -> its weight now."""
        return dict(self._weights)

    def set_weight(self, name: str, weight: float) -> None:
        """Change one weight from the next ``combine`` on.

        Raises:
            ValueError: No such component, or a weight that is not finite.
        """
        name = self._aliases.get(name, name)
        if name not in self._weights:
            raise ValueError(f"{name!r} is no component; choose from {sorted(self._weights)}.")
        self._weights[name] = _finite(name, weight)

    def combine(self, components: Mapping[str, Tensor], group_size: int) -> Tensor:
        """The weighted sum of the components.

        An abstaining sample takes the mean that its group's other samples have in that component,
        so that abstaining neither helps nor hurts: advantages compare samples with their group
        mean, and a None counted as 0 would rank the sample below all peers that were judged.
        Where a whole group abstains the component adds nothing.

        Args:
            components: Name -> [B], NaN where a sample abstained.
            group_size: G; rows i*G to (i+1)*G - 1 are one group.

        Returns:
            [B] fp32.

        Raises:
            ValueError: A component without a weight, no component, or a B that G does not divide.
        """
        if unknown := sorted(components.keys() - self._weights.keys()):
            raise ValueError(f"no weight for {unknown}; there are {sorted(self._weights)}.")
        if not components:
            raise ValueError("there is no reward component to combine.")
        # In fp64: the mean of equal values is then that value, and a group of equals stays one.
        total = torch.zeros_like(next(iter(components.values())), dtype=torch.float64)
        if total.numel() % group_size:
            raise ValueError(f"{total.numel()} rewards are not groups of group_size={group_size}.")
        for name, values in components.items():
            groups = values.double().view(-1, group_size)  # [P, G]
            group_mean = groups.nanmean(dim=1, keepdim=True).nan_to_num(0.0)  # [P, 1]
            filled = torch.where(groups.isnan(), group_mean, groups)
            total = total + self._weights[name] * filled.view(-1)
        return total.float()

    def state_dict(self) -> dict[str, float]:
        """Name -> weight."""
        return dict(self._weights)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ValueError: The state belongs to other components.
        """
        if state.keys() != self._weights.keys():
            raise ValueError(
                f"saved reward weights are of {sorted(state)}, this run's components are "
                f"{sorted(self._weights)}; resume with the tasks and extra_rewards of that run."
            )
        self._weights = {name: _finite(name, weight) for name, weight in state.items()}


def _finite(name: str, weight: float) -> float:
    if not math.isfinite(weight):
        raise ValueError(f"weight {name}={weight}: give a finite number.")
    return float(weight)


def exact_match(prompt: Any, completion: str, *, answer: Any, **columns: Any) -> float:
    """1 where the completion is ``answer``, but for surrounding white space."""
    return float(completion.strip() == str(answer).strip())


def contains(prompt: Any, completion: str, *, answer: Any, **columns: Any) -> float:
    """1 where ``answer`` stands in the completion as a whole word or phrase, in any case.

    Lenient by nature: an answer that lists every candidate passes.
    """
    pattern = rf"(?<!\w){re.escape(str(answer).strip())}(?!\w)"
    return float(re.search(pattern, completion, re.IGNORECASE) is not None)
