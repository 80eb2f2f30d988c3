"""Whether a plan fits a model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, get_args

from tropism.lora.plan import Plan, SitePlan, State

if TYPE_CHECKING:
    from tropism.measurements.layer_names import LinearSite


def check_plan(
    plan: Plan, sites: Sequence[LinearSite], *, can_train: Collection[int], max_rank: int
) -> None:
    """Refuse a plan that is not about these linears or asks what their adapters cannot do.

    Args:
        plan: One entry for each linear, in the model's order.
        sites: Every linear of the model.
        can_train: Positions of the linears that carry an adapter.
        max_rank: R.

    Raises:
        ValueError: Names the first entry that does not fit.
    """
    if len(plan) != len(sites):
        raise ValueError(
            f"plan: {len(plan)} entries for the model's {len(sites)} linears; give one for each, "
            "in the model's order."
        )
    for index, (entry, site) in enumerate(zip(plan, sites, strict=True)):
        if (entry.layer, entry.module) != (site.layer, site.module):
            raise ValueError(
                f"plan: entry {index} is {entry.key!r}, the model's linear there {site.key!r}; "
                "the plan is of another model, or in another order."
            )
        _check_entry(entry, has_adapter=index in can_train, max_rank=max_rank)


def _check_entry(entry: SitePlan, *, has_adapter: bool, max_rank: int) -> None:
    if entry.state not in get_args(State):
        raise ValueError(f"plan: {entry.key} has state {entry.state!r}; use {get_args(State)}.")
    if entry.state != "OFF" and not has_adapter:
        raise ValueError(
            f"plan: {entry.key} is {entry.state}, and carries no adapter; plan OFF there, or set "
            "lora.modules and lora.layers so that it gets one."
        )
    low, high = (1, max_rank) if entry.state == "TRAIN" else (0, 0)
    if not isinstance(entry.rank, int) or not low <= entry.rank <= high:
        raise ValueError(
            f"plan: {entry.key} is {entry.state} with rank {entry.rank}; TRAIN needs 1 to "
            f"{max_rank} (lora.rank), OFF and KEEP 0."
        )
    if not 0 < entry.lr_scale < math.inf:
        raise ValueError(f"plan: {entry.key} has lr_scale={entry.lr_scale}; give a number > 0.")
