"""How fast each adapter moves: its factor of the learning rate, its warm-up, what stands still.

Three things that AdamW does not do by itself where placement changes while it runs:

1. a component that is frozen inside a trained adapter stays bit for bit: no gradient, and weight
   decay undone;
2. a module that enters starts from empty moments and warms up, since AdamW's first steps are
   lr * sign(gradient) however small the gradient is;
3. a component that enters a module which trains already has empty moments, but the module's count
   of steps, so that AdamW's bias correction does not know that they are empty. Its step would be
   (1 - b1) / sqrt(1 - b2) = 3.2 times a first step, up to 6.6 times later on. It is scaled back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tropism.lora.plan import SitePlan
from tropism.lora.slots import Slot


@dataclass
class _Fresh:
    """Components of one adapter whose moments are younger than the module's count of steps."""

    slot: Slot
    components: Tensor  # (C,) indices
    factors: Tensor  # (C,) on the step that AdamW is about to take
    decayed: tuple[Tensor, Tensor]  # (C, d_in), (d_out, C) after weight decay alone


class Pace:
    """State of every adapter's step size.

    Args:
        slots: Position in the plan -> adapter.
        num_sites: Entries of the plan.
        max_rank: R.
        warmup_steps: Optimizer steps after entry until a module moves at full speed.
    """

    def __init__(
        self, slots: Mapping[int, Slot], *, num_sites: int, max_rank: int, warmup_steps: int
    ) -> None:
        self.slots, self.warmup_steps = slots, warmup_steps
        self.num_steps = 0
        # Steps since entry; None: no warm-up (it trains since the start of the run, or not at all).
        self.ages: list[int | None] = [None] * num_sites
        # The module's AdamW steps at which each component's moments were emptied.
        self.starts: list[list[int]] = [[0] * max_rank for _ in range(num_sites)]
        self._held: list[tuple[Tensor, Tensor]] | None = None
        self._fresh: list[_Fresh] | None = None

    # -- at a switch --------------------------------------------------------------------------

    def restart(self, index: int, optimizer: Any) -> None:
        """Forget all moments of a module; it warms up, unless no step was taken in this run."""
        slot = self.slots[index]
        if optimizer is not None:
            for parameter in (slot.a, slot.b):
                optimizer.state.pop(parameter, None)
        self.starts[index] = [0] * len(self.starts[index])
        self.ages[index] = 0 if self.num_steps > 0 else None

    def leave(self, index: int, optimizer: Any) -> None:
        """Forget a module that no longer trains."""
        self.restart(index, optimizer)
        self.ages[index] = None

    def change_rank(self, index: int, before: int, after: int, optimizer: Any) -> None:
        """Forget the moments of the components that stop or start training."""
        slot, low, high = self.slots[index], min(before, after), max(before, after)
        states = [optimizer.state.get(p, {}) for p in (slot.a, slot.b)] if optimizer else [{}, {}]
        for name in states[0].keys() & states[1].keys():
            pair = (states[0][name], states[1][name])
            if isinstance(pair[0], Tensor) and pair[0].shape == slot.a.shape:
                pair[0][low:high] = 0
                pair[1][:, low:high] = 0
        if after > before:
            self.starts[index][low:high] = [_steps(states[0])] * (high - low)
            self.ages[index] = 0 if self.num_steps > 0 else None

    # -- at a step ----------------------------------------------------------------------------

    def mask_gradients(self, plan: Sequence[SitePlan]) -> None:
        """Zero the gradient of frozen components, and remember where they are."""
        self._held = []
        for index, slot in self.slots.items():
            entry = plan[index]
            if entry.state != "TRAIN" or entry.rank == len(self.starts[index]):
                continue
            if slot.a.grad is not None and slot.b.grad is not None:
                for gradient in slot.beyond(entry.rank, (slot.a.grad, slot.b.grad)):
                    gradient.zero_()
            self._held += [(part, part.clone()) for part in slot.beyond(entry.rank)]

    def scale_learning_rates(
        self, plan: Sequence[SitePlan], optimizer: Any, base_lr: float
    ) -> None:
        """Set each group's rate to base_lr * lr_scale * warm-up, just before the step.

        Raises:
            ValueError: A module's A and B are not one group of their own.
        """
        groups: dict[int, dict[str, Any]] = {
            id(p): group for group in optimizer.param_groups for p in group["params"]
        }
        self._fresh = []
        for index, slot in self.slots.items():
            entry = plan[index]
            group = groups.get(id(slot.a), {"params": []})
            if group is not groups.get(id(slot.b)) or len(group["params"]) != 2:
                raise ValueError(
                    f"the optimizer has no parameter group of A and B of {slot.site.name!r} alone, "
                    "so its learning rate cannot be its own: build it with AdamW.build."
                )
            group["lr"] = base_lr * entry.lr_scale * self.warmup(index)
            if entry.state == "TRAIN" and slot.a.grad is not None:
                self._note_fresh(index, entry.rank, group, optimizer.state)

    def warmup(self, index: int) -> float:
        """Factor in (0, 1] on the learning rate of a module that entered a short while ago."""
        age = self.ages[index]
        if age is None or age >= self.warmup_steps:
            return 1.0
        return (age + 1) / self.warmup_steps

    def _note_fresh(
        self, index: int, rank: int, group: Mapping[str, Any], states: Mapping[Tensor, Any]
    ) -> None:
        slot, starts = self.slots[index], self.starts[index]
        fresh = [c for c in range(rank) if starts[c] > 0]
        if not fresh:
            return
        steps = _steps(states.get(slot.a, {})) + 1
        factors = [_correction(steps, steps - starts[c], group["betas"]) for c in fresh]
        if factors == [1.0] * len(fresh):
            return
        assert self._fresh is not None
        components = torch.tensor(fresh, device=slot.a.device)
        keep = 1 - group["lr"] * group["weight_decay"]
        decayed = (slot.a.detach()[components] * keep, slot.b.detach()[:, components] * keep)
        self._fresh.append(_Fresh(slot, components, slot.a.new_tensor(factors), decayed))

    def after_step(self, plan: Sequence[SitePlan]) -> None:
        """Put frozen components back, scale fresh ones' steps, and count the step.

        Raises:
            RuntimeError: ``mask_gradients`` and ``scale_learning_rates`` did not come before.
        """
        if self._held is None or self._fresh is None:
            raise RuntimeError(
                "after_step() needs mask_gradients() before clipping and scale_learning_rates() "
                "before the optimizer's step: frozen components may have moved."
            )
        with torch.no_grad():
            for fresh in self._fresh:
                a, b, (decayed_a, decayed_b) = fresh.slot.a, fresh.slot.b, fresh.decayed
                step_a, step_b = a[fresh.components] - decayed_a, b[:, fresh.components] - decayed_b
                a[fresh.components] = decayed_a + fresh.factors[:, None] * step_a
                b[:, fresh.components] = decayed_b + fresh.factors * step_b
            for part, kept in self._held:
                part.copy_(kept)
        self._held = self._fresh = None
        self.num_steps += 1
        for index, age in enumerate(self.ages):
            if age is not None and plan[index].state == "TRAIN":
                self.ages[index] = age + 1

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values: steps in all, since each entry, and each component's start."""
        return {
            "num_steps": self.num_steps,
            "ages": list(self.ages),
            "starts": [list(starts) for starts in self.starts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self.num_steps, self.ages = state["num_steps"], list(state["ages"])
        self.starts = [list(starts) for starts in state["starts"]]
        self._held = self._fresh = None


def _steps(state: Mapping[str, Any]) -> int:
    return int(state.get("step", 0))


def _correction(steps: int, own: int, betas: tuple[float, float]) -> float:
    """What turns AdamW's bias correction after ``steps`` steps into that after ``own``."""
    first, second = betas
    return (
        (1 - first**steps) / (1 - first**own) * math.sqrt((1 - second**own) / (1 - second**steps))
    )
