"""Small observations, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest

from tropism.adaptation.contracts import (
    ComponentObservation,
    Decision,
    PlacementObservation,
    RewardObservation,
    SiteObservation,
)
from tropism.adaptation.decide import make
from tropism.lora.plan import Plan, SitePlan, plan_from_rows

MAX_RANK = 4


def _site(
    layer: int | None,
    module: str = "q",
    *,
    state: Literal["OFF", "TRAIN", "KEEP"] = "TRAIN",
    rank: int | None = None,
    lr_scale: float = 1.0,
    d_in: int = 5,
    d_out: int = 5,
    can_train: bool = True,
    z: float | None = 5.0,
    **signals: float | None,
) -> SiteObservation:
    if rank is None:
        rank = MAX_RANK if state == "TRAIN" else 0
    plan = SitePlan(layer, module, state, rank, lr_scale)
    return SiteObservation(plan, d_in, d_out, can_train, signals, z)


def _observe(
    *sites: SiteObservation,
    rollout: int = 10,
    step: int = 10,
    probes: int = 12,
    z: float | None = 9.0,
    num_rollbacks: int = 0,
) -> PlacementObservation:
    return PlacementObservation(rollout, step, MAX_RANK, probes, z, tuple(sites), num_rollbacks)


def _with_plan(observation: PlacementObservation, decision: Decision) -> PlacementObservation:
    plan = plan_from_rows(decision.value["plan"])
    sites = tuple(
        replace(site, plan=entry) for site, entry in zip(observation.sites, plan, strict=True)
    )
    return replace(
        observation, rollout=observation.rollout + 1, step=observation.step + 1, sites=sites
    )


def _component(
    name: str,
    weight: float = 1.0,
    *,
    initial: float | None = None,
    mean: float | None = 0.5,
    std: float | None = 0.25,
    norm: float | None = 1.0,
) -> ComponentObservation:
    initial = weight if initial is None else initial
    return ComponentObservation(name, weight, initial, mean, std, norm)


def _rewards(*components: ComponentObservation, probes: int = 12) -> RewardObservation:
    return RewardObservation(10, 10, probes, "accuracy", components)


def _ask(policy: Any, observation: Any, state: Mapping[str, Any] | None = None) -> Decision:
    return make(policy, observation, state or {}, (0, 1, observation.rollout))


def _plan(decision: Decision) -> Plan:
    return plan_from_rows(decision.value["plan"])


def _trained(decision: Decision) -> list[str]:
    return [entry.key for entry in _plan(decision) if entry.state == "TRAIN"]


@pytest.fixture
def site() -> Callable[..., SiteObservation]:
    """A linear of 5 x 5 (10 parameters per component) that trains, with the signals given."""
    return _site


@pytest.fixture
def observe() -> Callable[..., PlacementObservation]:
    """A placement observation with plenty of evidence, max_rank 4."""
    return _observe


@pytest.fixture
def with_plan() -> Callable[[PlacementObservation, Decision], PlacementObservation]:
    """The same map a rollout later, with the decision's plan in force."""
    return _with_plan


@pytest.fixture
def component() -> Callable[..., ComponentObservation]:
    """One reward component."""
    return _component


@pytest.fixture
def rewards() -> Callable[..., RewardObservation]:
    """A reward observation whose outcome is ``accuracy``."""
    return _rewards


@pytest.fixture
def ask() -> Callable[..., Decision]:
    """Ask a policy, as a run does."""
    return _ask


@pytest.fixture
def plan_of() -> Callable[[Decision], Plan]:
    """The plan of a decision."""
    return _plan


@pytest.fixture
def trained() -> Callable[[Decision], list[str]]:
    """Keys of the linears that train under a decision."""
    return _trained
