"""Asking a policy so that the answer can be recomputed, and the JSON of question and answer."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import numpy as np

from tropism.adaptation.contracts import (
    ComponentObservation,
    Decision,
    PlacementObservation,
    PolicyState,
    RewardObservation,
    RolloutObservation,
    SiteObservation,
    input_digest,
)
from tropism.lora.plan import SitePlan

KINDS = ("placement", "rewards", "rollouts")


def random_key(seed: int, kind: str, rollout: int) -> tuple[int, ...]:
    """What a decision's generator is seeded with: the same in a resumed run."""
    digest = hashlib.sha256(kind.encode()).digest()
    return (seed, int.from_bytes(digest[:4], "big"), rollout)


def make(policy: Any, observation: Any, state: PolicyState, key: tuple[int, ...]) -> Decision:
    """Ask ``policy``, with a generator of ``key``; ``inputs`` says on what it decided.

    Value, scores and state come back as a record would give them back, so that a run that goes on
    and one that resumes or is replayed see the same.

    Raises:
        ValueError: The policy is set to, or answered with, something that JSON does not have, NaN
            included; or with a plan in which nothing trains.
    """
    decision: Decision = policy.decide(observation, state, np.random.default_rng(list(key)))
    try:
        value, scores, after = (plain(x) for x in (decision.value, decision.scores, decision.state))
        inputs = input_digest(policy_to_json(policy), observation_to_json(observation), state, key)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{type(policy).__name__} is set to or decided with something that JSON does not have "
            f"({error}): use lists, dicts, finite numbers, strings and None."
        ) from error
    plan = value.get("plan") if decision.action == "apply" else None
    if plan and all(site["state"] != "TRAIN" for site in plan):
        raise ValueError(
            f"{type(policy).__name__} planned that nothing trains, at rollout "
            f"{observation.rollout}: no update has a gradient then; train one linear, or hold."
        )
    return replace(decision, value=value, scores=tuple(scores), state=after, inputs=inputs)


# -- JSON --------------------------------------------------------------------------------------


def plain(content: Any) -> Any:
    """``content`` as JSON would give it back: tuples as lists, floats exactly as they were.

    Raises:
        TypeError: Something that JSON does not have.
        ValueError: NaN or infinity.
    """
    return json.loads(json.dumps(content, allow_nan=False))


def policy_to_json(policy: Any) -> dict[str, Any]:
    """``{"class_path": ..., "init_args": ...}``, as a config has it; nested policies too."""
    kind = type(policy)
    arguments = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    return {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": {
            name: policy_to_json(value) if is_dataclass(value) else value
            for name, value in arguments.items()
        },
    }


def policy_from_json(content: Mapping[str, Any]) -> Any:
    """The policy again. A list becomes a tuple: settings are immutable.

    Raises:
        ValueError: No such class, or settings that it does not have or refuses.
    """
    module, _, name = content["class_path"].rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {content['class_path']!r} cannot be imported: {error}") from error
    if not (is_dataclass(kind) and hasattr(kind, "decide")):
        raise ValueError(f"{content['class_path']!r} is no policy: a dataclass with `decide`.")
    arguments = {
        key: policy_from_json(value)
        if isinstance(value, Mapping) and "class_path" in value
        else tuple(value)
        if isinstance(value, list)
        else value
        for key, value in content["init_args"].items()
    }
    try:
        return kind(**arguments)  # type: ignore[operator]
    except TypeError as error:
        raise ValueError(f"policy {content['class_path']!r}: {error}") from error


def observation_to_json(observation: Any) -> dict[str, Any]:
    """Plain mappings and lists; what is not measured is left out where older runs lack it."""
    content = asdict(observation)
    if content.get("gain_z", 0) is None:
        del content["gain_z"]
    return content


def observation_from_json(kind: str, content: Mapping[str, Any]) -> Any:
    """The observation again.

    Raises:
        ValueError: No such kind.
    """
    if kind == "placement":
        sites = tuple(
            SiteObservation(**{**site, "plan": SitePlan(**site["plan"])})
            for site in content["sites"]
        )
        return PlacementObservation(**{**content, "sites": sites})
    if kind == "rewards":
        components = tuple(ComponentObservation(**part) for part in content["components"])
        return RewardObservation(**{**content, "components": components})
    if kind == "rollouts":
        return RolloutObservation(**content)
    raise ValueError(f"kind={kind!r}: choose from {KINDS}.")


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """Plain mappings and lists."""
    return {**asdict(decision), "scores": list(decision.scores)}


def decision_from_json(content: Mapping[str, Any]) -> Decision:
    """The decision again."""
    return Decision(**{**content, "scores": tuple(content["scores"])})
