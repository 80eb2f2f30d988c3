"""What a plan says for each linear: whether LoRA trains there, with what rank and what step size.

A plan is intent. ``tropism.lora.placement`` carries it out; ``tropism.adaptation`` decides it.
Loads no torch, so that decisions are recomputed anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["OFF", "TRAIN", "KEEP"]
"""OFF: no adapter compute, B = 0. TRAIN: trained. KEEP: applied as it is, frozen."""


@dataclass(frozen=True)
class SitePlan:
    """The plan of one linear.

    Args:
        layer: Decoder layer, None outside the layers.
        module: Label of the linear within its layer.
        state: OFF, TRAIN or KEEP.
        rank: Components of the adapter that train: 0 for OFF and KEEP, 1 to R for TRAIN. The
            others are frozen where they are; their part of the forward does not change.
        lr_scale: Factor on the learning rate of this adapter.
    """

    layer: int | None
    module: str
    state: State
    rank: int
    lr_scale: float = 1.0

    @property
    def key(self) -> str:
        """``3.q_proj``; the bare module name outside the layers."""
        return self.module if self.layer is None else f"{self.layer}.{self.module}"


Plan = tuple[SitePlan, ...]
"""One entry per linear of the model, in the model's order."""


def plan_digest(plan: Plan) -> str:
    """SHA-256 of the plan: equal plans, equal digests, on every rank and machine."""
    text = json.dumps([asdict(site) for site in plan], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_from_rows(rows: Iterable[Mapping[str, Any]]) -> Plan:
    """A plan out of mappings with the fields of ``SitePlan``; other keys are ignored."""
    names = ("layer", "module", "state", "rank", "lr_scale")
    return tuple(SitePlan(**{name: row[name] for name in names}) for row in rows)
