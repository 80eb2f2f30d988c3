"""Carries out a plan on a model whose LoRA was injected once, at fixed shapes, on every linear.

1. What trains is *recorded intent*: the plan. PEFT's flags are set from it and never read back;
   ``reassert`` repairs them after whatever may have toggled them, ``check`` finds what was missed.
2. No switch moves the logits. OFF is only for B = 0; what has trained stays applied (KEEP), and so
   do the components beyond a smaller rank. Shapes, scaling and parameters never change.
3. A switch happens between rollouts, when there are no gradients.

The order of a step is::

    backward -> placement.mask_gradients() -> clip
    -> placement.scale_learning_rates(optimizer, base_lr) -> optimizer.step()
    -> placement.after_step() -> scheduler.step()
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from tropism.lora.pace import Pace
from tropism.lora.plan import Plan, SitePlan, plan_from_rows
from tropism.lora.plan_change import PlanChange, compare
from tropism.lora.plan_checks import check_plan
from tropism.lora.slots import Slot

if TYPE_CHECKING:
    from tropism.measurements.layer_names import LinearSite


class Placement:
    """Where LoRA trains in a model, with what rank and what step size.

    Args:
        sites: Every linear of the model, in its order.
        layer_of: The PEFT layer at a linear, or None where it carries no adapter: OFF for good.
        max_rank: R of every adapter.
        adapter: Name of the adapter.
        warmup_steps: Optimizer steps over which a module that enters while training comes to its
            full learning rate; 0 for none.
        plan: In force from the start; ``initial_plan`` where None.

    Raises:
        ValueError: An adapter of another rank, or a plan that does not fit.
    """

    def __init__(
        self,
        sites: Sequence[LinearSite],
        layer_of: Callable[[LinearSite], LoraLayer | None],
        *,
        max_rank: int,
        adapter: str = "default",
        warmup_steps: int = 20,
        plan: Plan | None = None,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: give 0 (none) or more.")
        self.sites, self.max_rank = tuple(sites), max_rank
        self._slots: dict[int, Slot] = {}
        for index, site in enumerate(self.sites):
            layer = layer_of(site)
            if layer is not None and adapter in layer.lora_A:
                self._slots[index] = Slot(site, layer, adapter)
                if (rank := self._slots[index].a.shape[0]) != max_rank:
                    raise ValueError(
                        f"the adapter of {site.name!r} has rank {rank}, the others {max_rank}: "
                        "placement needs one rank; ranks below it are part of the plan."
                    )
        self._began_in_use = frozenset(i for i, slot in self._slots.items() if slot.is_in_use())
        self._pace = Pace(
            self._slots,
            num_sites=len(self.sites),
            max_rank=max_rank,
            warmup_steps=warmup_steps,
        )
        self._plan = plan if plan is not None else initial_plan(self.sites, layer_of, max_rank)
        self._validate(self._plan)
        self.reassert()

    # -- intent -------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What is in force."""
        return self._plan

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps over which a module that enters comes to its full learning rate."""
        return self._pace.warmup_steps

    @warmup_steps.setter
    def warmup_steps(self, steps: int) -> None:
        self._pace.warmup_steps = steps

    def entry(self, site: LinearSite) -> SitePlan:
        """What is in force at one linear."""
        return self._plan[self.sites.index(site)]

    def num_trainable(self) -> int:
        """Scalars of A and B that train now."""
        return sum(slot.num_scalars(self._plan[i].rank) for i, slot in self._slots.items())

    def feasible(self, plan: Plan) -> Plan:
        """The plan with KEEP for OFF where an adapter must stay: policies see no weights."""
        return tuple(
            replace(entry, state="KEEP") if entry.state == "OFF" and self._need(i) else entry
            for i, entry in enumerate(plan)
        )

    def reassert(self) -> None:
        """Set active adapters and ``requires_grad`` from the plan; cheap and idempotent.

        Call it after anything that may have toggled them: PEFT's ``disable_adapter``,
        ``add_adapter``, ``load_adapter`` or ``set_adapter``, a resume. Not inside a ``View``.
        """
        for index, slot in self._slots.items():
            slot.set_state(self._plan[index].state)

    def check(self) -> None:
        """Assert that the model is as the plan says.

        Raises:
            RuntimeError: Names the first linear that is not, and the remedy.
        """
        for index, slot in self._slots.items():
            state = self._plan[index].state
            if problem := slot.problem(state):
                raise RuntimeError(
                    f"the plan says {state} for {slot.site.name!r}, which {problem}: something "
                    "toggled the adapters; call placement.reassert() after it."
                )
        off = [(i, slot) for i, slot in self._slots.items() if self._plan[i].state == "OFF"]
        if off and bool(torch.stack([slot.b.detach().any() for _, slot in off]).any()):  # one sync
            slot = next(slot for _, slot in off if slot.is_in_use())
            raise RuntimeError(
                f"the plan says OFF for {slot.site.name!r}, whose B is not 0: it was written to, "
                "and the logits lack its part. Plan KEEP there."
            )

    # -- switches -----------------------------------------------------------------------------

    def apply(self, plan: Plan, optimizer: Any, *, reset: Collection[str] = ()) -> PlanChange:
        """Switch to ``plan``; the logits stay exactly as they are.

        Modules that enter forget their moments and warm up, and so do modules whose rank grows,
        of which only the new components forget. Before the first optimizer step of a run there
        is no warm-up.

        Args:
            plan: One entry for each linear.
            optimizer: With a group for each adapter (``AdamW.build``); None before it is built.
            reset: Keys of linears that train on, to restart as if they entered (a control).

        Raises:
            ValueError: The plan does not fit the model, or OFF where B is not 0 or was not when
                the run started. Nothing changed.
            RuntimeError: There are gradients: switch after ``zero_grad(set_to_none=True)``.
        """
        self._require_no_gradients()
        self._validate(plan)
        before, after = self._plan, tuple(plan)
        change = compare(before, after, reset=reset)
        for index, slot in self._slots.items():
            old, new = before[index], after[index]
            if new.key in change.entered or new.key in change.restarted:
                self._pace.restart(index, optimizer)
            elif new.key in change.left:
                self._pace.leave(index, optimizer)
            elif new.key in change.ranks:
                self._pace.change_rank(index, old.rank, new.rank, optimizer)
            slot.set_state(new.state)
        self._plan = after
        return change

    def truncate(self, site: LinearSite) -> float:
        """Zero the components beyond the rank in force, for the control that cuts ranks off.

        The logits jump. A keeps its rows, so that a component can train again.

        Returns:
            ||what was cut off|| / ||the weight in use before||.

        Raises:
            ValueError: Nothing trains there, so that all of the adapter would go.
        """
        self._require_no_gradients()
        index = self._index(site)
        entry = self._plan[index]
        if entry.state != "TRAIN":
            raise ValueError(
                f"truncate({site.name!r}): the plan says {entry.state} there, so that no component "
                "would be left, and a reference that holds the adapter would need it; plan TRAIN "
                "with rank 1 or more."
            )
        return self._slots[index].truncate(entry.rank)

    def reenter_on(self, site: LinearSite, a_new: Tensor) -> None:
        """Let an adapter whose B is 0 start from other rows of A; the function does not change.

        Args:
            site: The linear.
            a_new: [k, d_in] rows for the first k components, used as they are: PEFT's random rows
                have a norm of about 0.58, singular vectors of 1.

        Raises:
            ValueError: B is not 0, or the rows do not fit.
        """
        self._require_no_gradients()
        self._slots[self._index(site)].reenter_on(a_new)

    # -- a step -------------------------------------------------------------------------------

    def mask_gradients(self) -> None:
        """After backward and before clipping: no gradient for frozen components."""
        self._pace.mask_gradients(self._plan)

    def scale_learning_rates(self, optimizer: Any, base_lr: float) -> None:
        """Just before ``optimizer.step()``: each group's rate is base_lr * lr_scale * warm-up.

        Args:
            optimizer: AdamW with a group for each adapter.
            base_lr: The schedule's value (``scheduler.get_last_lr()[0]``), which the schedule's
                next step writes into every group again.

        Raises:
            ValueError: A module's A and B are not one group of their own.
        """
        self._pace.scale_learning_rates(self._plan, optimizer, base_lr)

    def after_step(self) -> None:
        """Right after ``optimizer.step()``: frozen components back, bit for bit; count the step.

        Raises:
            RuntimeError: One of the two above was left out.
        """
        self._pace.after_step(self._plan)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The plan and the steps since each entry, as plain values."""
        return {"plan": [asdict(entry) for entry in self._plan], **self._pace.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave, before or after the weights and the moments.

        Raises:
            ValueError: It is of another model or other adapters. Nothing changed.
        """
        plan = plan_from_rows(state["plan"])
        check_plan(plan, self.sites, can_train=self._slots.keys(), max_rank=self.max_rank)
        self._plan = plan
        self._pace.load_state_dict(state)
        self.reassert()

    # -- helpers ------------------------------------------------------------------------------

    def _index(self, site: LinearSite) -> int:
        for index, slot in self._slots.items():
            if slot.site.name == site.name:
                return index
        raise ValueError(f"{site.name!r} carries no adapter: set lora.modules and lora.layers so.")

    def _validate(self, plan: Plan) -> None:
        check_plan(plan, self.sites, can_train=self._slots.keys(), max_rank=self.max_rank)
        for index, entry in enumerate(plan):
            if entry.state == "OFF" and (need := self._need(index)):
                raise ValueError(
                    f"plan: OFF for {self.sites[index].name!r}, {need}. Plan KEEP there "
                    "(placement.feasible does)."
                )

    def _need(self, index: int) -> str | None:
        """Why the adapter at this position of the plan cannot be OFF; None where it can."""
        if index not in self._slots:
            return None
        if self._slots[index].is_in_use():
            return "whose B is not 0: without its part the logits would jump"
        if index in self._began_in_use:  # B was cut to 0 since
            return (
                "whose adapter the run started from: the reference still is that adapter, and "
                "shows it where it is active"
            )
        return None

    def _require_no_gradients(self) -> None:
        for slot in self._slots.values():
            if slot.a.grad is not None or slot.b.grad is not None:
                raise RuntimeError(
                    f"{slot.site.name!r} has a gradient: placement changes between rollouts, after "
                    "optimizer.zero_grad(set_to_none=True)."
                )


def initial_plan(
    sites: Sequence[LinearSite],
    layer_of: Callable[[LinearSite], LoraLayer | None],
    max_rank: int,
) -> Plan:
    """TRAIN at full rank where there is an adapter, OFF elsewhere."""
    return tuple(
        SitePlan(site.layer, site.module, "OFF", 0)
        if layer_of(site) is None
        else SitePlan(site.layer, site.module, "TRAIN", max_rank)
        for site in sites
    )
