"""Extra rewards beside a task's own: names, weights, order, abstention and faults."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tropism.resume import check_same_rewards
from tropism.rewards import RewardError, Rewards, component_tensors, score_completions
from tropism.scoring import component_names, score_rollouts
from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.extra import Carrier, ExtraReward, carry
from tropism.types import Completion, Prompt, Rollout


class Digits(Task):
    """The completion is a digit; its tenth is the reward."""

    components = ("value",)
    primary = "value"

    def __init__(self, name: str = "digits") -> None:
        self.name = name

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [Prompt(id=f"{self.name}-{i}", task=self.name, text="?") for i in range(num)]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return {"value": int(completion[0]) / 10}

    def gold(self, prompt: Prompt) -> str | None:
        return "9"

    def baselines(self) -> dict[str, Any]:
        return {"zero": lambda prompt: "0"}


class Short(ExtraReward):
    """1 / tokens; None for a truncated completion. Remembers whom it was asked about together."""

    def __init__(self, name: str = "short") -> None:
        self.name = name
        self.asked: list[list[str]] = []

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        is_cut = completion.finish_reason == "length"
        return None if is_cut else 1 / len(completion.token_ids)

    def score_batch(self, prompts: Any, completions: Any) -> Sequence[float | None]:
        self.asked.append([prompt.id for prompt in prompts])
        return super().score_batch(prompts, completions)


def rollout(task: Task, *answers: tuple[str, int], num: int = 0) -> Rollout:
    """Completions of a text and a number of tokens; a negative one was cut."""
    completions = tuple(
        Completion((1,) * abs(n), text, torch.zeros(abs(n)), "stop" if n > 0 else "length")
        for text, n in answers
    )
    return Rollout(task.prompts("train", num + 1, 0)[num], (1,), completions)


def test_a_carrier_is_the_task_but_for_its_components() -> None:
    own = Digits()
    (task,) = carry([own], [Short()]).values()
    (prompt,) = task.prompts("train", 1, 0)
    assert (task.name, task.primary, task.components) == ("digits", "value", ("value", "short"))
    assert task.score(prompt, "7") == {"value": 0.7}
    assert task.gold(prompt) == "9"
    assert task.baselines()["zero"](prompt) == "0"
    assert own.components == ("value",)


def test_a_carrier_forwards_every_method_that_a_task_has() -> None:
    methods = {name for name, _ in inspect.getmembers(Task, inspect.isfunction)}
    missing = {name for name in methods if not name.startswith("_")} - vars(Carrier).keys()
    assert not missing, "add them to Carrier: a task with extra rewards would lose its own"


def test_without_extra_rewards_a_task_stays_itself() -> None:
    task = Digits()
    assert carry([task], None)["digits"] is task
    assert carry([task], [])["digits"] is task


def test_completions_are_seen_whole_and_all_at_once() -> None:
    reward = Short()
    tasks = carry([Digits(), Digits("others")], [reward])
    rollouts = [
        rollout(tasks["digits"], ("7", 4), ("8", -3)),
        rollout(tasks["others"], ("1", 2), ("2", 1)),
        rollout(tasks["digits"], ("3", 5), ("4", 8), num=1),
    ]
    scores = score_rollouts(tasks, rollouts)
    assert reward.asked == [["digits-0"] * 2 + ["others-0"] * 2 + ["digits-1"] * 2]
    assert scores == [
        [{"value": 0.7, "short": 0.25}, {"value": 0.8, "short": None}],
        [{"value": 0.1, "short": 0.5}, {"value": 0.2, "short": 1.0}],
        [{"value": 0.3, "short": 0.2}, {"value": 0.4, "short": 0.125}],
    ]
    tensors = component_tensors([one for group in scores for one in group])
    nan = math.nan
    expected = {
        "digits.value": [0.7, 0.8, nan, nan, 0.3, 0.4],
        "digits.short": [0.25, nan, nan, nan, 0.2, 0.125],
        "others.value": [nan, nan, 0.1, 0.2, nan, nan],
        "others.short": [nan, nan, 0.5, 1.0, nan, nan],
    }
    assert list(tensors) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(tensors[name], torch.tensor(values), equal_nan=True)


def test_weights_go_by_component_or_by_task_and_component() -> None:
    tasks = carry([Digits(), Digits("others")], [Short()])
    weights = {"value": 1.0, "short": 0.5, "others.short": 0.0}
    rewards = Rewards(weights, tasks)
    assert rewards.weights == {
        "digits.value": 1.0, "digits.short": 0.5, "others.value": 1.0, "others.short": 0.0
    }  # fmt: skip
    one = carry([Digits()], [Short()])
    assert component_names(one) == {("digits", "value"): "value", ("digits", "short"): "short"}
    assert Rewards(None, one).weights == {"value": 1.0, "short": 1.0}
    with pytest.raises(ValueError, match=r"reward_weights lacks \['digits.short'\]"):
        Rewards({"value": 1.0}, one)
    with pytest.raises(ValueError, match=r"reward_weights has \['short'\], which no task gives"):
        Rewards({"value": 1.0, "short": 1.0}, carry([Digits()], None))


def test_an_abstaining_sample_takes_the_mean_of_its_group() -> None:
    tasks = carry([Digits()], [Short()])
    group = rollout(tasks["digits"], ("5", 1), ("5", 2), ("5", -9))
    (scores,) = score_rollouts(tasks, [group])
    combined = Rewards({"value": 0.0, "short": 1.0}, tasks).combine(
        component_tensors(scores), group_size=3
    )
    assert combined.tolist() == [1.0, 0.5, 0.75]


def test_weights_of_a_run_without_extra_rewards_are_refused_by_one_with_them() -> None:
    saved = Rewards(None, carry([Digits()], None)).state_dict()
    Rewards(None, carry([Digits()], None)).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"\['short', 'value'\]; resume with .*extra_rewards"):
        Rewards(None, carry([Digits()], [Short()])).load_state_dict(saved)


def test_of_texts_alone_only_the_task_judges() -> None:
    tasks = carry([Digits()], [Short()])
    (prompt,) = tasks["digits"].prompts("train", 1, 0)
    assert score_completions(tasks, prompt, ["7"]) == [{"value": 0.7, "short": None}]


class Failing(Short):
    """Fails on the completion ``bad``; as a batch, with the first of all."""

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        if completion.text.startswith("6"):
            raise KeyError("no judge")
        return 1.0


class FailingTogether(Short):
    def score_batch(self, prompts: Any, completions: Any) -> Sequence[float | None]:
        if len(prompts) > 1:
            raise MemoryError("too many")
        return [1.0]


class Fixed(Short):
    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = values

    def score_batch(self, prompts: Any, completions: Any) -> Sequence[Any]:
        return self.values


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Failing(), r"\.Failing raised KeyError: 'no judge'.*prompt 'digits-0'.*completion '6'"),
        (FailingTogether(), r"\.FailingTogether raised MemoryError: too many.*completion '5'"),
        (Fixed(1.0, 0.5, 1.5), r"\.Fixed gave short=1.5; return .*prompt 'digits-0'.*'7'"),
        (Fixed(1.0, math.nan, 1.0), r"\.Fixed gave short=nan"),
        (Fixed(1.0, "1", 1.0), r"\.Fixed gave short='1'"),
        (Fixed(1.0, 1.0), r"\.Fixed gave 2 scores for 3 completions"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_stop_the_run_with_the_name_and_the_row(reward: Short, message: str) -> None:
    tasks = carry([Digits()], [reward])
    with pytest.raises(RewardError, match=message):
        score_rollouts(tasks, [rollout(tasks["digits"], ("5", 1), ("6", 1), ("7", 1))])


def test_a_fault_of_the_task_itself_still_bears_the_tasks_name() -> None:
    tasks = carry([Digits()], [Short()])
    with pytest.raises(RewardError, match=r"\.Digits\.score raised ValueError"):
        score_rollouts(tasks, [rollout(tasks["digits"], ("x", 1))])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([Short("value")], r"Short is named 'value' like another component of task 'digits'"),
        ([Short(), Short()], r"Short is named 'short' like another"),
        ([Short("a.b")], "name='a.b' of Short must be made of letters"),
        ([Short("")], "name='' of Short must be"),
    ],
)
def test_names_that_are_refused(rewards: list[ExtraReward], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        carry([Digits()], rewards)


class Custom(ExtraReward):
    """As users write them: a name of its own, and arguments that are no plain values."""

    name = "custom"
    only_where = frozenset({"address"})

    def __init__(self, judge: Any, bounds: tuple[int, int] = (0, 1), address: str = "") -> None:
        self.judge, self.bounds, self.address = judge, bounds, address

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 1.0


def test_what_a_resumed_run_compares() -> None:
    identity = Custom(math.gcd, address="http://a").identity()
    assert identity == {
        "name": "custom",
        "class": f"{Custom.__module__}.Custom",
        "judge": "math.gcd",
        "bounds": [0, 1],
    }
    check_same_rewards([identity], [Custom(math.gcd, (0, 1), "http://b").identity()])
    check_same_rewards([Custom(Short()).identity()], [Custom(Short()).identity()])
    with pytest.raises(ValueError, match=r"custom.bounds: \[0, 1\] in the .*, \[0, 2\] here"):
        check_same_rewards([identity], [Custom(math.gcd, (0, 2)).identity()])
    with pytest.raises(ValueError, match=r"custom.judge: 'math.gcd' in .* 'math.lcm' here"):
        check_same_rewards([identity], [Custom(math.lcm).identity()])
