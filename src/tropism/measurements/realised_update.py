"""How much of the update that AdamW asks for reaches the weights.

A bf16 weight keeps 8 bits. A step of 1e-6 on a weight of 0.02 is a hundredth of the distance to
the next bf16 number: it is rounded away, and training stands still while loss, gradient norm and
learning rate all look as they should (trl#7268).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

MAX_ELEMENTS = 65_536
"""Elements of one parameter that are compared: every k-th one of a larger parameter."""


def requested_update(
    weight: Float[Tensor, "*shape"],
    *,
    first_moment: Float[Tensor, "*shape"],
    second_moment: Float[Tensor, "*shape"],
    num_steps: int,
    settings: Mapping[str, Any],
) -> Float[Tensor, "*shape"]:
    """What AdamW adds to ``weight`` (1711.05101, algorithm 2), in fp32.

    Args:
        weight: Before the step.
        first_moment: Of the gradient, this step's included.
        second_moment: The same.
        num_steps: Steps so far, this one included.
        settings: ``lr``, ``betas``, ``eps`` and ``weight_decay`` of the parameter's group.
    """
    first_decay, second_decay = settings["betas"]
    mean = first_moment.float() / (1 - first_decay**num_steps)
    root = (second_moment.float() / (1 - second_decay**num_steps)).sqrt()
    direction = mean / (root + settings["eps"]) + settings["weight_decay"] * weight.float()
    update: Tensor = -settings["lr"] * direction
    return update


class StepMeter:
    """Compares requested with realised over the steps that an AdamW takes while it is attached.

    Args:
        optimizer: Attached to from now on; parameters without a gradient are none of its business.
        max_elements: Of one parameter that are compared; bounds memory and time.
    """

    def __init__(self, optimizer: torch.optim.AdamW, *, max_elements: int = MAX_ELEMENTS) -> None:
        self._max_elements = max_elements
        self._before: dict[Tensor, Tensor] = {}
        self._requested: list[Tensor] = []  # squared norms, on the parameters' devices
        self._realised: list[Tensor] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._keep),
            optimizer.register_step_post_hook(self._compare),
        ]

    def detach(self) -> float | None:
        """Leave the optimizer alone again.

        Returns:
            ||realised|| / ||requested|| over all steps and parameters: about 1 with fp32 weights
            (rounding up can bring it above 1); None where nothing was requested.
        """
        for handle in self._handles:
            handle.remove()
        requested = sum(float(square) for square in self._requested)
        realised = sum(float(square) for square in self._realised)
        return (realised / requested) ** 0.5 if requested > 0 else None

    @torch.no_grad()
    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._before = {
            parameter: self._sample(parameter).clone()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }

    @torch.no_grad()
    def _compare(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                before = self._before.pop(parameter, None)
                if before is None:
                    continue
                state = optimizer.state[parameter]
                requested = requested_update(
                    before,
                    first_moment=self._sample(state["exp_avg"]),
                    second_moment=self._sample(state["exp_avg_sq"]),
                    num_steps=int(state["step"]),
                    settings=group,
                )
                realised = self._sample(parameter).float() - before.float()
                # Every k-th element stands for k of them.
                share = parameter.numel() / before.numel()
                self._requested.append(share * requested.square().sum())
                self._realised.append(share * realised.square().sum())

    def _sample(self, tensor: Tensor) -> Tensor:
        stride = -(-tensor.numel() // self._max_elements)
        # Odd, so that it does not walk along the few same columns of a matrix.
        return tensor.detach().reshape(-1)[:: stride + (stride % 2 == 0)]
