"""How far each linear's effective weight moved in the last update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tropism.lora.plan import Plan
from tropism.measurements.gain import Move
from tropism.policy import Policy


class Moves:
    """Keeps the adapters of one moment, and tells how far they are from it later."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, Tensor, float]] = {}

    def keep(self, policy: Policy, plan: Plan) -> None:
        """Remember the adapters of now, and the step sizes that the next update will have."""
        scales = {site.key: site.lr_scale for site in plan if site.state == "TRAIN"}
        self._before = {}
        for site in policy.sites:
            adapter = policy.adapter(site)
            if adapter is not None and site.key in scales:
                a, b = (factor.detach().float().clone() for factor in (adapter.a, adapter.b))
                self._before[site.key] = (a, b, scales[site.key])

    def since(self, policy: Policy) -> dict[str, Move]:
        """The moves by key of the linear; linears that stayed where they were are left out."""
        moves = {}
        for site in policy.sites:
            adapter = policy.adapter(site)
            if adapter is None or site.key not in self._before:
                continue
            a, b = adapter.a.detach().float(), adapter.b.detach().float()
            old_a, old_b = (factor.to(a.device) for factor in self._before[site.key][:2])
            scale = self._before[site.key][2]
            if scale == 0 or (torch.equal(a, old_a) and torch.equal(b, old_b)):
                continue
            # B A - B' A' without the difference of two large products.
            left = adapter.scaling * torch.cat([b - old_b, old_b], dim=1)
            moves[site.key] = Move(left, torch.cat([a, a - old_a]), scale)
        return moves

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to measure its first move."""
        return dict(self._before)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        self._before = dict(state)
