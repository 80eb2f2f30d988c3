"""Controls around another policy: what is left of it without its timing, its map or its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tropism.adaptation.contracts import (
    Decision,
    PlacementObservation,
    PlacementPolicy,
    PolicyState,
)
from tropism.adaptation.plans import hold, plan_rows, present_plan, random_cycles
from tropism.adaptation.settings import require
from tropism.lora.plan import plan_from_rows


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """One decision of another policy, then that plan for ever: is adapting worth more than once?

    Before its time the policy is asked with pooled_z undefined, so that it averages the map and
    holds; what it would apply all the same is not. Its evidence adds up from its time on only.

    Args:
        policy: Decides.
        after_rollouts: Its first plan at or after so many rollouts is applied.
    """

    policy: PlacementPolicy
    after_rollouts: int = 0

    def __post_init__(self) -> None:
        require(self.after_rollouts >= 0, self, "after_rollouts", "give 0 or more")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Holds, applies once, holds."""
        if state.get("is_done"):
            return hold(observation, "one shot, taken", state=state)
        inner: PolicyState = state.get("policy", {})
        if observation.rollout < self.after_rollouts:
            early = self.policy.decide(replace(observation, pooled_z=None), inner, rng)
            kept = early.state if early.action == "hold" else inner
            reason = f"one shot is due after rollout {self.after_rollouts}"
            return hold(
                observation,
                reason,
                state={"policy": kept, "is_done": False},
                scores=early.scores,
                pooled_z=observation.pooled_z,
            )
        decision = self.policy.decide(observation, inner, rng)
        is_done = decision.action == "apply"
        return replace(decision, state={"policy": decision.state, "is_done": is_done})


@dataclass(frozen=True, kw_only=True)
class SwitchOnly:
    """What switching costs by itself: another policy's switches, with the plan unchanged.

    The policy decides as if its plans were in force (on this run's signals). Where it would
    apply one, so does this: the plan in force again, with ``reset`` in the decision's value, the
    keys of the linears whose state or rank it would have changed. Their moments are to be zeroed
    and warmed up as on entry. A policy that only moves step sizes resets nothing.

    Args:
        policy: Decides when, and where.
    """

    policy: PlacementPolicy

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Applies whenever the policy would."""
        imagined = plan_from_rows(state["plan"]) if "plan" in state else present_plan(observation)
        sites = tuple(
            replace(site, plan=plan) for site, plan in zip(observation.sites, imagined, strict=True)
        )
        inner = self.policy.decide(replace(observation, sites=sites), state.get("policy", {}), rng)
        wanted = plan_from_rows(inner.value["plan"])
        reset = [
            new.key
            for old, new in zip(imagined, wanted, strict=True)
            if (old.state, old.rank) != (new.state, new.rank)
        ]
        value = {**inner.value, "plan": plan_rows(present_plan(observation)), "reset": reset}
        after = {"policy": inner.state, "plan": plan_rows(wanted)}
        restart = f"plan unchanged, {len(reset)} linears restart; "
        return replace(
            inner,
            value={**value, "jaccard": 1.0},
            state=after,
            reason=restart + inner.reason if inner.action == "apply" else inner.reason,
        )


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Another policy, on the map of other linears: does it matter where the signal is?

    Each linear is shown the signals and z of another one of the same module and shape, in an
    order drawn at the first decision and kept. No linear keeps its own map, unless it is the only
    one of its kind.

    Args:
        policy: Decides.
    """

    policy: PlacementPolicy

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """What the policy decides on the shuffled map."""
        source: Mapping[str, str] = state.get("source") or random_cycles(observation, rng)
        by_key = {site.plan.key: site for site in observation.sites}
        sites = tuple(
            replace(
                site,
                signals=by_key[source[site.plan.key]].signals,
                null_z=by_key[source[site.plan.key]].null_z,
            )
            if site.plan.key in source
            else site
            for site in observation.sites
        )
        inner = self.policy.decide(replace(observation, sites=sites), state.get("policy", {}), rng)
        after = {"policy": inner.state, "source": dict(source)}
        return replace(inner, state=after, reason=f"shuffled map; {inner.reason}")
