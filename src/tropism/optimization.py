"""Optimizer and schedule, shared by every way of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class AdamW:
    """AdamW with a schedule over optimizer steps.

    Args:
        learning_rate: Peak learning rate. LoRA wants about ten times that of full fine-tuning.
        schedule: After the warm-up: ``constant``, or ``linear`` / ``cosine`` down to 0.
        warmup_steps: Optimizer steps over which the learning rate rises from 0.
        betas: Decay of the first and second moments.
        epsilon: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Gradients are scaled down to this global norm; null leaves them.
    """

    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"optimizer.learning_rate={self.learning_rate}: give a value > 0.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"optimizer.max_grad_norm={self.max_grad_norm}: give a value > 0, or null."
            )

    def build(
        self, named_parameters: Mapping[str, nn.Parameter], *, num_steps: int
    ) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer over these parameters and its schedule over ``num_steps`` steps.

        A and B of one linear are a group of their own, so that each can have its own learning
        rate; all else is one group. Groups know their parameters' names. The updates are the
        same, bit for bit, as those of a single group.
        """
        from transformers import get_scheduler

        optimizer = torch.optim.AdamW(
            _groups(named_parameters),
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
        )
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=max(num_steps, self.warmup_steps + 1),
        )
        return optimizer, scheduler


def _groups(named_parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """One group of (name, parameter) pairs for each adapter, and one for what is no adapter."""
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters.items():
        adapted, _, side = name.partition(".lora_")  # ..q_proj, A.default.weight
        adapter = side.partition(".")[2]
        groups.setdefault(f"{adapted} {adapter}" if side else "", []).append((name, parameter))
    return [{"params": group} for group in groups.values()]
