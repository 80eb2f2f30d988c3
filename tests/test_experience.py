"""Sampling, judging and resampling, with an engine whose completions are given."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tropism.experience import Experience
from tropism.objective.settings import Objective
from tropism.rewards import Rewards
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Task
from tropism.types import Completion, Prompt, Rollout

PROMPTS = [Prompt(id=name, task="digits", text=name) for name in ("a", "b")]


class Digits(Task):
    """The completion is a digit; its tenth is the reward."""

    name = "digits"
    components: ClassVar[tuple[str, ...]] = ("value",)
    primary: ClassVar[str] = "value"

    def prompts(self, split, num, seed):
        return PROMPTS[:num]

    def score(self, prompt, completion):
        return {"value": int(completion[0]) / 10}


class Given:
    """Answers of each call, by prompt; remembers what it was asked."""

    def __init__(self, *calls: dict[str, tuple[str, ...]]) -> None:
        self.calls = list(calls)
        self.asked: list[tuple[list[str], int]] = []

    def generate(self, prompts, *, group_size, sampling, seed, rollout, progress=None):
        answers = self.calls[len(self.asked)]
        self.asked.append(([prompt.id for prompt in prompts], seed))
        return [
            Rollout(
                prompt,
                (1,),
                tuple(
                    Completion(tuple(range(len(text))), text, torch.zeros(len(text)), "stop")
                    for text in answers[prompt.id]
                ),
            )
            for prompt in prompts
        ]


def collect(engine: Given, *, shuffle_rewards: bool = False, group_size: int = 2, **objective):
    tasks = {"digits": Digits()}
    experience = Experience(
        engine=engine,
        tasks=tasks,
        rewards=Rewards(None, tasks),
        objective=Objective(**objective),
        sampling=Sampling(max_new_tokens=10),
        group_size=group_size,
        seed=7,
        shuffle_rewards=shuffle_rewards,
    )
    return experience.collect(PROMPTS, rollout=3)


def test_only_groups_without_signal_are_drawn_again_and_only_so_often():
    engine = Given({"a": ("1", "1"), "b": ("1", "2")}, {"a": ("5", "5")}, {"a": ("6", "6")})
    batch = collect(engine, max_resamples=2)
    assert [ids for ids, _ in engine.asked] == [["a", "b"], ["a"], ["a"]]
    assert len({seed for _, seed in engine.asked}) == 3  # other random numbers each time
    assert [c.text for c in batch.completions] == ["6", "6", "1", "2"]
    assert batch.zero_variance.tolist() == [True, False]


def test_resampling_stops_when_every_group_has_signal():
    engine = Given({"a": ("1", "1"), "b": ("1", "2")}, {"a": ("5", "3")})
    batch = collect(engine, max_resamples=5)
    assert len(engine.asked) == 2
    assert not batch.zero_variance.any()
    assert batch.rewards.tolist() == pytest.approx([0.5, 0.3, 0.1, 0.2])


def test_soft_overlong_lowers_the_reward_of_long_completions():
    engine = Given({"a": ("1" * 10, "1"), "b": ("1" * 8, "2")})
    batch = collect(engine, overlong_buffer=4)
    assert batch.rewards.tolist() == pytest.approx([0.1 - 1, 0.1, 0.1 - 0.5, 0.2])


def test_aggregation_by_component():
    engine = Given({"a": ("1", "3"), "b": ("2", "2")})
    batch = collect(engine, aggregation="normalize_then_sum")
    assert batch.zero_variance.tolist() == [False, True]
    assert batch.advantages[0].item() == pytest.approx(-batch.advantages[1].item())
    assert batch.advantages[2:].tolist() == [0, 0]


def test_shuffled_rewards_are_those_of_the_group_dealt_out_anew_and_keyed():
    answers = {"a": tuple("01234567"), "b": tuple("76543210")}
    plain = collect(Given(answers), group_size=8)
    shuffled = collect(Given(answers), group_size=8, shuffle_rewards=True)
    for group in (slice(0, 8), slice(8, 16)):
        assert sorted(shuffled.rewards[group].tolist()) == sorted(plain.rewards[group].tolist())
        assert shuffled.rewards[group].tolist() != plain.rewards[group].tolist()
    again = collect(Given(answers), group_size=8, shuffle_rewards=True)
    assert torch.equal(shuffled.rewards, again.rewards)
