"""The plans of an earlier run, replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.plans import answer, hold, retire, train
from tropism.adaptation.settings import require
from tropism.lora.plan import Plan, plan_from_rows
from tropism.measurements.records import read


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What another run decided, without its measurements: was it the plan, or the adapting?

    Args:
        plans: A run folder, or its ``records/plans.jsonl``. Read once, when the policy is made.
        mode: ``final``: the run's last plan, from the first decision on. ``schedule``: each plan
            from its rollout on.
    """

    plans: str
    mode: Literal["final", "schedule"] = "final"
    schedule: tuple[tuple[int, Plan], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.mode in ("final", "schedule"), self, "mode", "choose final or schedule")
        folder = Path(self.plans)
        if folder.name == "plans.jsonl" and folder.parent.name == "records":
            folder = folder.parent.parent
        file = folder / "records" / "plans.jsonl"
        require(
            file.is_file(),
            self,
            "plans",
            f"{file} does not exist; give the folder of a run that recorded plans",
        )
        table = read(folder, "plans").astype(object)
        schedule = _schedule(table.where(table.notna(), None).to_dict("records"))
        require(len(schedule) > 0, self, "plans", f"{file} is empty; give a run that has plans")
        object.__setattr__(self, "schedule", schedule)

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Applies each plan once: what the guard takes back is not tried again.

        Raises:
            ValueError: The recorded plan is of other linears, ranks or adapters than this run's.
        """
        last = len(self.schedule) - 1
        due = [i for i, (rollout, _) in enumerate(self.schedule) if rollout <= observation.rollout]
        index = last if self.mode == "final" else max(due, default=-1)
        if index == state.get("index", -1):
            return hold(observation, f"plan {index + 1} of {last + 1} is in force", state=state)
        rollout, recorded = self.schedule[index]
        plan = self._fitted(recorded, observation)
        reason = f"plan {index + 1} of {last + 1}, of rollout {rollout} in {self.plans}"
        return answer(observation, plan, reason=reason, state={"index": index})

    def _fitted(self, recorded: Plan, observation: PlacementObservation) -> Plan:
        """The recorded plan, in this run's order; what never trained here is OFF, not KEEP."""
        by_key = {site.key: site for site in recorded}
        if other := sorted(by_key.keys() ^ {site.plan.key for site in observation.sites}):
            raise ValueError(
                f"Replay.plans={self.plans!r}: {other[0]} and {len(other) - 1} more linears are in "
                "one of the recorded plan and this model alone; replay a run of the same model."
            )
        plan = []
        for site in observation.sites:
            wanted = by_key[site.plan.key]
            if wanted.state != "TRAIN":
                plan.append(retire(site, observation) if site.can_train else site.plan)
                continue
            if not site.can_train or wanted.rank > observation.max_rank:
                here = f"at most {observation.max_rank}" if site.can_train else "has no adapter"
                raise ValueError(
                    f"Replay.plans={self.plans!r}: {wanted.key} trains at rank {wanted.rank} there "
                    f"and {here} here; give the model the LoRA modules and rank of that run."
                )
            plan.append(train(site, wanted.rank, wanted.lr_scale))
        return tuple(plan)


def _schedule(rows: Iterable[Mapping[Any, Any]]) -> tuple[tuple[int, Plan], ...]:
    """(rollout, plan) in order; of two plans of one rollout the later one was in force."""
    plans: list[tuple[int, dict[str, Mapping[str, Any]]]] = []
    for row in rows:
        # A column of layers with a gap was read as floats.
        layer = None if row["layer"] is None else int(row["layer"])
        site = {**row, "layer": layer, "rank": int(row["rank"])}
        key, rollout = f"{layer}.{row['module']}", int(row["rollout"])
        if not plans or key in plans[-1][1] or plans[-1][0] != rollout:
            plans.append((rollout, {}))
        plans[-1][1][key] = site
    return tuple({rollout: plan_from_rows(sites.values()) for rollout, sites in plans}.items())
