"""The state before a switch, to go back to: adapters, moments, plan, reward weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tropism.finetuning import FineTuning
from tropism.lora.optimizer_state import load_state_by_name, state_by_name


@dataclass(frozen=True)
class Snapshot:
    """All that a switch and what follows it can spoil; the schedule goes on.

    Args:
        rollout: Rollouts done when it was taken.
        weights: Trainable tensors by name.
        moments: The optimizer's state by name.
        placement: The plan and the age of each adapter.
        reward_weights: Component -> weight.
    """

    rollout: int
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Any]]
    placement: dict[str, Any]
    reward_weights: dict[str, float]

    @staticmethod
    def take(module: FineTuning) -> Snapshot:
        """Copy the state of now; to be called between rollouts."""
        assert module.placement is not None
        named = module.policy.named_trainable()
        return Snapshot(
            module.rollout,
            {name: parameter.detach().clone() for name, parameter in named.items()},
            state_by_name(module.raw_optimizer(), named),
            module.placement.state_dict(),
            module.rewards.state_dict(),
        )

    def restore(self, module: FineTuning) -> None:
        """Put it back; optimizer steps taken since are undone, their place in the schedule kept."""
        assert module.placement is not None
        named = module.policy.named_trainable()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(self.weights[name])
        load_state_by_name(module.raw_optimizer(), named, self.moments)
        module.placement.load_state_dict(self.placement)
        module.rewards.load_state_dict(self.reward_weights)
        module.engine.sync()
