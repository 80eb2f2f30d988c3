"""Asking a policy, JSON there and back, and policies out of a config."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from tropism.adaptation import placement, rewards, rollouts
from tropism.adaptation.contracts import (
    Decision,
    PlacementPolicy,
    PolicyState,
    RewardPolicy,
    RolloutObservation,
    RolloutPolicy,
    input_digest,
)
from tropism.adaptation.decide import (
    decision_from_json,
    decision_to_json,
    make,
    observation_from_json,
    observation_to_json,
    plain,
    policy_from_json,
    policy_to_json,
    random_key,
)
from tropism.adaptation.plans import answer

OBSERVATION = RolloutObservation(3, 5, 8, 4, 8, 12.5, 0.1)


@dataclass(frozen=True)
class Stub:
    """Answers with what it is given, and what it draws."""

    value: Any = None
    state: Any = None
    note: Any = None

    def decide(self, observation: Any, state: PolicyState, rng: np.random.Generator) -> Decision:
        value = {"drawn": float(rng.random()), "value": self.value}
        return Decision("hold", "so it is", value, (), {"state": self.state})


class OtherStub(Stub):
    """Answers alike."""


def test_random_key_is_stable_and_apart() -> None:
    assert random_key(7, "placement", 3) == (7, 343997202, 3)
    keys = {
        random_key(seed, kind, rollout)
        for seed in range(3)
        for kind in ("placement", "rewards", "rollouts")
        for rollout in range(3)
    }
    assert len(keys) == 27


def test_make_draws_from_the_key_and_says_on_what() -> None:
    key = random_key(0, "rollouts", 3)
    first, again = (
        make(Stub(), OBSERVATION, {"a": 1}, key),
        make(Stub(), OBSERVATION, {"a": 1}, key),
    )
    assert first == again
    assert first.value["drawn"] == float(np.random.default_rng(list(key)).random())
    asked = (policy_to_json(Stub()), observation_to_json(OBSERVATION))
    assert first.inputs == input_digest(*asked, {"a": 1}, key)
    others = [
        make(Stub(note="changes no answer"), OBSERVATION, {"a": 1}, key),
        make(OtherStub(), OBSERVATION, {"a": 1}, key),
        make(Stub(), OBSERVATION, {"a": 2}, key),
        make(Stub(), OBSERVATION, {"a": 1}, random_key(0, "rollouts", 4)),
    ]
    assert [other.value for other in others[:2]] == [first.value] * 2
    assert len({first.inputs, *(other.inputs for other in others)}) == 5


def test_make_answers_as_a_record_would() -> None:
    decision = make(Stub(value=(1, 2), state={"t": (0.1, None)}), OBSERVATION, {}, (0, 1, 2))
    assert decision.value["value"] == [1, 2]
    assert decision.state == {"state": {"t": [0.1, None]}}


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, np.float32(1)])
def test_make_refuses_what_json_lacks(value: Any) -> None:
    message = "Stub is set to or decided with something that JSON does not have"
    with pytest.raises(ValueError, match=message):
        make(Stub(value=value), OBSERVATION, {}, (0, 1, 2))
    with pytest.raises(ValueError, match=message):
        make(Stub(note=value), OBSERVATION, {}, (0, 1, 2))


def test_make_refuses_a_plan_in_which_nothing_trains(site: Any, observe: Any) -> None:
    class Nothing:
        def decide(self, observation: Any, state: PolicyState, rng: Any) -> Decision:
            plan = [replace(each.plan, state="KEEP", rank=0) for each in observation.sites]
            return answer(observation, plan, reason="none", state={})

    with pytest.raises(ValueError, match="Nothing planned that nothing trains, at rollout"):
        make(dataclass(frozen=True)(Nothing)(), observe(site(0), site(1)), {}, (0, 1, 2))


def test_observations_there_and_back(site: Any, observe: Any, component: Any, rewards: Any) -> None:
    third = 1 / 3
    observations = {
        "placement": observe(site(0, snr=third, debiased=None), site(None, z=None, lr_scale=third)),
        "rewards": rewards(component("accuracy", third), component("format", mean=None)),
        "rollouts": OBSERVATION,
    }
    for kind, observation in observations.items():
        text = json.dumps(observation_to_json(observation))
        assert observation_from_json(kind, json.loads(text)) == observation
    with pytest.raises(ValueError, match=r"kind='weather': choose from \('placement'"):
        observation_from_json("weather", {})


def test_decisions_there_and_back(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(placement.SignalShrink(), observe(site(0, snr=0.1), site(1, snr=1 / 3)))
    assert decision_from_json(json.loads(json.dumps(decision_to_json(decision)))) == decision


POLICIES: list[tuple[Any, Any]] = [
    (PlacementPolicy, placement.Uniform(rank=3)),
    (PlacementPolicy, placement.Static(modules=("q", "k"), layers=(1, 2))),
    (PlacementPolicy, placement.Static(layers="top_third")),
    (PlacementPolicy, placement.SignalShrink(only_shrink=True, low=0.1, min_z=None)),
    (PlacementPolicy, placement.TopBudget(signal="plop", budget=0.25, floor=0.0)),
    (PlacementPolicy, placement.Depth(num_iterations=3, min_probes=4)),
    (PlacementPolicy, placement.Sensitivity(end_rollout=9)),
    (PlacementPolicy, placement.Rotate(share=0.5, seed_offset=2)),
    (PlacementPolicy, placement.OneShot(policy=placement.Depth(dwell=0), after_rollouts=30)),
    (PlacementPolicy, placement.SwitchOnly(policy=placement.TopBudget())),
    (
        PlacementPolicy,
        placement.Shuffled(policy=placement.OneShot(policy=placement.SignalShrink(high=3.0))),
    ),
    (RewardPolicy, rewards.Fixed()),
    (RewardPolicy, rewards.GDPO()),
    (RewardPolicy, rewards.GradientShare(target=0.7)),
    (RewardPolicy, rewards.SaturationDecay(should_recover=True)),
    (RewardPolicy, rewards.SAW(max_step=2.0)),
    (RolloutPolicy, rollouts.Fixed()),
    (RolloutPolicy, rollouts.CriticalGroups(group_sizes=(4, 8), equal_samples=True)),
]


@pytest.mark.parametrize(("protocol", "policy"), POLICIES, ids=lambda item: type(item).__name__)
def test_policies_there_and_back_and_out_of_a_config(protocol: Any, policy: Any) -> None:
    content = plain(policy_to_json(policy))
    assert policy_from_json(content) == policy
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=protocol)
    config = parser.parse_object({"policy": content})
    assert parser.instantiate(config).policy == policy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"class_path": "tropism.nowhere.X", "init_args": {}}, "cannot be imported"),
        ({"class_path": "tropism.adaptation.placement.X", "init_args": {}}, "cannot be imported"),
        ({"class_path": "subprocess.Popen", "init_args": {}}, "is no policy"),
        (
            {"class_path": "tropism.adaptation.placement.Depth", "init_args": {"width": 1}},
            "unexpected keyword argument 'width'",
        ),
        (
            {"class_path": "tropism.adaptation.placement.Depth", "init_args": {"dwell": -1}},
            r"Depth\.dwell=-1",
        ),
    ],
)
def test_what_is_no_policy_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_from_json(content)
