"""Weights as decisions. A weight is moved as a multiple of its initial one, so that signs stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tropism.adaptation.contracts import ComponentObservation, Decision, RewardObservation


def present_weights(observation: RewardObservation) -> dict[str, float]:
    """What is in force."""
    return {component.name: component.weight for component in observation.components}


def is_movable(component: ComponentObservation) -> bool:
    """Whether a policy may weigh it: a weight of 0 only measures, and stays 0."""
    return component.initial_weight != 0 and component.weight != 0


def outcome_of(observation: RewardObservation) -> ComponentObservation:
    """The component that says whether the task was solved.

    Raises:
        ValueError: ``outcome`` names none.
    """
    for component in observation.components:
        if component.name == observation.outcome:
            return component
    raise ValueError(
        f"outcome={observation.outcome!r} is no reward component; choose from "
        f"{[component.name for component in observation.components]}."
    )


def answer(
    observation: RewardObservation,
    changes: Mapping[str, float],
    *,
    reason: str,
    state: Mapping[str, Any],
    **extra: Any,
) -> Decision:
    """Apply the present weights with ``changes`` in them; hold where that changes nothing."""
    now = present_weights(observation)
    new = {**now, **changes}
    if new == now:
        return hold(observation, reason, state=state, **extra)
    return Decision("apply", reason, {"weights": new, **extra}, scores=(), state=state)


def hold(
    observation: RewardObservation, reason: str, *, state: Mapping[str, Any], **extra: Any
) -> Decision:
    """Keep the weights that are in force."""
    value = {"weights": present_weights(observation), **extra}
    return Decision("hold", reason, value, scores=(), state=state)
