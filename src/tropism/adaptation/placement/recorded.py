"""The plans of an earlier run, replayed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.plans import answer, hold, random_cycles, retire, train
from tropism.adaptation.settings import require
from tropism.lora.plan import Plan, SitePlan, plan_from_rows
from tropism.measurements.records import read

Mode = Literal["final", "schedule", "average"]
Schedule = tuple[tuple[int, Plan], ...]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What another run decided, without its measurements: was it the plan, or the adapting?

    *average* is one plan: a linear that trained at any time trains, with the root mean square of
    its step size over all rollouts of the run (0 where it did not train). So the squared updates,
    which ``SignalShrink`` keeps at uniform's, sum to what they did there.

    *should_shuffle* gives each linear the entries of another one of the same module and shape, in
    an order drawn at the first decision and kept: the same step sizes and states at the same
    rollouts, as many parameters and as much update, elsewhere.

    Args:
        plans: A run folder, or its ``records/plans.jsonl``. Read once, when the policy is made.
        mode: ``final``: the run's last plan, from the first decision on. ``schedule``: each plan
            from its rollout on. ``average``: the average of its plans, from the first decision on.
        should_shuffle: Permute the plans over linears; another seed of the run, another order.
    """

    plans: str
    mode: Mode = "final"
    should_shuffle: bool = False
    schedule: Schedule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self.mode in get_args(Mode), self, "mode", "choose final, schedule or average")
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
        if self.mode == "average":
            steps = read(folder, "steps")
            require(len(steps) > 0, self, "plans", "no steps are recorded there to average over")
            schedule = ((0, _average(schedule, end=int(steps["rollout"].max()))),)
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
        index = max(due, default=-1) if self.mode == "schedule" else last
        if index == state.get("index", -1):
            return hold(observation, f"plan {index + 1} of {last + 1} is in force", state=state)
        rollout, recorded = self.schedule[index]
        after: dict[str, Any] = {"index": index}
        if self.should_shuffle:
            after["source"] = dict(state.get("source") or random_cycles(observation, rng))
        plan = self._fitted(recorded, observation, after.get("source", {}))
        what = "average" if self.mode == "average" else f"of rollout {rollout}"
        shuffled = ", shuffled" if self.should_shuffle else ""
        reason = f"plan {index + 1} of {last + 1}, {what} in {self.plans}{shuffled}"
        return answer(observation, plan, reason=reason, state=after)

    def _fitted(
        self, recorded: Plan, observation: PlacementObservation, source: Mapping[str, str]
    ) -> Plan:
        """The recorded plan, in this run's order; what never trained here is OFF, not KEEP."""
        by_key = {site.key: site for site in recorded}
        if other := sorted(by_key.keys() ^ {site.plan.key for site in observation.sites}):
            raise ValueError(
                f"Replay.plans={self.plans!r}: {other[0]} and {len(other) - 1} more linears are in "
                "one of the recorded plan and this model alone; replay a run of the same model."
            )
        plan = []
        for site in observation.sites:
            wanted = by_key[source.get(site.plan.key, site.plan.key)]
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


def _schedule(rows: Iterable[Mapping[Any, Any]]) -> Schedule:
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


def _average(schedule: Schedule, *, end: int) -> Plan:
    """One plan for all rollouts up to ``end``; each was in force after its rollout's update.

    Raises:
        ValueError: A linear trained at several ranks.
    """
    # The first plan was there before the first rollout.
    changes = [-1, *(rollout for rollout, _ in schedule[1:]), end]
    shares = np.diff(changes) / (end + 1)
    sites = zip(*(plan for _, plan in schedule), strict=True)
    return tuple(_average_entry(entries, shares.tolist()) for entries in sites)


def _average_entry(entries: Sequence[SitePlan], shares: Sequence[float]) -> SitePlan:
    trained = [(e, s) for e, s in zip(entries, shares, strict=True) if e.state == "TRAIN" and s > 0]
    if not trained:
        return entries[-1]
    if len(ranks := sorted({entry.rank for entry, _ in trained})) > 1:
        raise ValueError(
            f"Replay.mode='average': {entries[0].key} trained at the ranks {ranks}, of which there "
            "is no average; replay final or schedule."
        )
    scale = math.sqrt(math.fsum(share * entry.lr_scale**2 for entry, share in trained))
    return replace(trained[0][0], lr_scale=scale)
