"""What a policy sees, and what it answers: plain data, recorded with every decision.

A policy is a frozen dataclass with ``decide(observation, state, rng) -> Decision``. It never sees
a Trainer or a model, keeps nothing itself and draws only from ``rng``: a run's decisions are
recomputed from its records alone (``python -m tropism.adaptation.replay RUN``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from tropism.lora.plan import SitePlan

SIGNALS = (
    "raw",
    "debiased",
    "snr",
    "consistency",
    "update_norm",
    "captured_gain",
    "plop",
    "weight_norm",
    "misalignment",
    "gain",
)
"""Measured per linear; None where undefined. ``random`` and ``shuffled`` are made by policies."""

PolicyState = Mapping[str, Any]
"""JSON values only; {} before a policy's first decision."""


@dataclass(frozen=True)
class SiteObservation:
    """One linear, as a placement policy sees it.

    Args:
        plan: What is in force there now.
        d_in: Input features.
        d_out: Output features.
        can_train: Whether there is an adapter that could train.
        signals: Name in ``SIGNALS`` -> value, None where undefined.
        null_z: Standard deviations of ``debiased`` above its permutation null; None: undefined.
    """

    plan: SitePlan
    d_in: int
    d_out: int
    can_train: bool
    signals: Mapping[str, float | None]
    null_z: float | None


@dataclass(frozen=True)
class PlacementObservation:
    """What a placement policy decides on.

    Args:
        rollout: The rollout just done; 0 also before the first.
        step: Optimizer steps done.
        max_rank: R, components of every adapter.
        probes_pooled: Probes behind the signals.
        pooled_z: The z of the sum of ``debiased`` over all linears, each in units of its own
            energy, against the same permutations for all of them, so that what they share is not
            counted as evidence twice.
        sites: Every linear, in the order of the plan.
        num_rollbacks: Times that the guard took a switch back, since the start of the run.
        gain_z: The z of what the last updates gained, all linears together; None: not measured.
    """

    rollout: int
    step: int
    max_rank: int
    probes_pooled: int
    pooled_z: float | None
    sites: tuple[SiteObservation, ...]
    num_rollbacks: int = 0
    gain_z: float | None = None


@dataclass(frozen=True)
class ComponentObservation:
    """One reward component.

    Args:
        name: As in a rollout batch.
        weight: In force now.
        initial_weight: At the start of the run.
        mean: Mean over the completions of the last rollouts, in [0, 1]; None where all abstained.
        group_std: Mean standard deviation within a group; None where undefined.
        gradient_norm_sq: Squared norm of this component's gradient at weight 1, summed over the
            linears that now train, debiased; None where undefined.
        cosines: Other component -> cosine of the two gradients; None where undefined.
    """

    name: str
    weight: float
    initial_weight: float
    mean: float | None
    group_std: float | None
    gradient_norm_sq: float | None
    cosines: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardObservation:
    """What a reward policy decides on.

    Args:
        rollout: The rollout just done; 0 also before the first.
        step: Optimizer steps done.
        probes_pooled: Probes behind the gradient norms.
        outcome: Name of the component that says whether the task was solved.
        components: Every component of the run.
    """

    rollout: int
    step: int
    probes_pooled: int
    outcome: str
    components: tuple[ComponentObservation, ...]


@dataclass(frozen=True)
class RolloutObservation:
    """What a rollout policy decides on.

    Args:
        rollout: The rollout just done; 0 also before the first.
        step: Optimizer steps done.
        probes_pooled: Probes behind the noise scale.
        num_groups: P in force now.
        group_size: G in force now.
        noise_scale: Groups at which an update's signal equals its noise; None: undefined.
        frac_zero_variance: Share of the last groups that carried no signal.
    """

    rollout: int
    step: int
    probes_pooled: int
    num_groups: int
    group_size: int
    noise_scale: float | None
    frac_zero_variance: float


@dataclass(frozen=True)
class Decision:
    """A policy's answer.

    Args:
        action: ``apply`` the value, or ``hold`` what is in force.
        reason: One sentence for the record and the log.
        value: What to apply. Placement: ``{"plan": [fields of SitePlan, ...]}``. Rewards:
            ``{"weights": {component: weight}}``. Rollouts: ``{"num_groups": P, "group_size": G}``.
            For ``hold`` the same form, what is in force.
        scores: Placement: one score per linear, None where undefined; else empty.
        state: The policy's state for its next decision.
        inputs: SHA-256 of the policy's class and settings, observation, state and random key that
            led here.
    """

    action: Literal["apply", "hold"]
    reason: str
    value: Mapping[str, Any]
    scores: tuple[float | None, ...]
    state: PolicyState
    inputs: str = ""


class PlacementPolicy(Protocol):
    """Decides where LoRA trains; a frozen dataclass whose fields are its settings."""

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Deterministic given the three arguments; ``observation`` must fit the settings."""
        ...


class RewardPolicy(Protocol):
    """Decides what rewards weigh; a frozen dataclass whose fields are its settings."""

    def decide(
        self, observation: RewardObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Deterministic given the three arguments; ``observation`` must fit the settings."""
        ...


class RolloutPolicy(Protocol):
    """Decides how much is sampled; a frozen dataclass whose fields are its settings."""

    def decide(
        self, observation: RolloutObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Deterministic given the three arguments; ``observation`` must fit the settings."""
        ...


def input_digest(
    policy: Mapping[str, Any] | None,
    observation: Mapping[str, Any],
    state: PolicyState,
    random_key: tuple[int, ...],
) -> str:
    """SHA-256 of everything that a decision depends on.

    Args:
        policy: Its class and settings, as ``decide.policy_to_json`` gives them. None leaves them
            out: that is how runs recorded it before digests covered them.
        observation: As ``decide.observation_to_json`` gives it.
        state: The policy's before the decision.
        random_key: Seeds its generator.

    Raises:
        TypeError: Something that JSON does not have.
        ValueError: NaN or infinity.
    """
    content = {"observation": observation, "state": state, "rng": list(random_key)}
    if policy is not None:
        content["policy"] = policy
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
