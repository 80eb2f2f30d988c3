"""Weights, abstention, and what happens when a task's verifier fails."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tropism.rewards import Rewards, component_tensors, score_completions
from tropism.scoring import RewardError, score_rollouts
from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.rows import Rows
from tropism.types import Completion, Prompt, Rollout

NAN = float("nan")


class Fixed(Task):
    """Gives whatever it was made with."""

    components = ("form", "right")
    primary = "right"

    def __init__(self, answer: Any = None, name: str = "fixed") -> None:
        self.answer, self.name = answer, name

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        raise NotImplementedError

    def score(self, prompt: Prompt, completion: str) -> Scores:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Other(Fixed):
    components = ("right", "short")


FIXED = {"fixed": Fixed()}
BOTH = {"fixed": Fixed({"form": 1, "right": 0.5}), "other": Other({"right": 1.0, "short": None})}


def prompt_of(task: str) -> Prompt:
    return Prompt(id=f"{task}-1", task=task, text="?")


def combine(weights: dict[str, float], group_size: int, **components: list[float]) -> list[float]:
    tensors = {name: torch.tensor(values) for name, values in components.items()}
    return Rewards(weights, FIXED).combine(tensors, group_size=group_size).tolist()


def test_weighted_sum_by_hand() -> None:
    rewards = combine(
        {"form": 0.5, "right": 2.0}, 2, form=[1.0, 0.0, 0.5, 1.0], right=[0.0, 1.0, 0.25, 0.0]
    )
    assert rewards == [0.5, 2.0, 0.75, 0.5]


@pytest.mark.fault(9)
def test_an_abstaining_sample_takes_its_own_groups_mean() -> None:
    rewards = combine(
        {"form": 1.0, "right": 0.0},
        3,
        form=[0.25, 0.75, NAN, NAN, NAN, 1.0],
        right=[1.0] * 6,
    )
    assert rewards == [0.25, 0.75, 0.5, 1.0, 1.0, 1.0]


def test_a_group_that_abstains_as_a_whole_gets_nothing_from_the_component() -> None:
    assert combine({"form": 1.0, "right": 0.5}, 2, form=[NAN, NAN, 1.0, 0.0], right=[1.0] * 4) == [
        0.5,
        0.5,
        1.5,
        0.5,
    ]


@pytest.mark.fault(9)
def test_abstaining_leaves_the_sample_without_advantage_and_the_others_as_they_were() -> None:
    with_it = torch.tensor(combine({"form": 1, "right": 0}, 4, form=[0.0, 1.0, 1.0, NAN]))
    without = torch.tensor(combine({"form": 1, "right": 0}, 3, form=[0.0, 1.0, 1.0]))
    advantages = with_it - with_it.mean()
    torch.testing.assert_close(advantages[:3], without - without.mean())
    assert abs(float(advantages[3])) < 1e-6


def test_a_group_of_equals_stays_one_beside_an_abstainer() -> None:
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        rewards = combine({"form": 1.0, "right": 0.0}, 8, form=[value] * 7 + [NAN])
        assert len(set(rewards)) == 1


def test_advantages_do_not_depend_on_the_order_of_samples_or_components() -> None:
    form, right = [0.1, NAN, 0.7, 0.3], [NAN, 1.0, 0.0, 1.0]
    rewards = combine({"form": 0.3, "right": 0.7}, 4, form=form, right=right)
    order = [2, 0, 3, 1]
    permuted = combine(
        {"right": 0.7, "form": 0.3},
        4,
        right=[right[i] for i in order],
        form=[form[i] for i in order],
    )
    assert permuted == pytest.approx([rewards[i] for i in order])


def test_names_and_weights_of_several_tasks() -> None:
    rows = [*score_completions(BOTH, prompt_of("fixed"), ["a", "b"])]
    rows += score_completions(BOTH, prompt_of("other"), ["c", "d"])
    assert rows[0] == {"form": 1.0, "right": 0.5}  # by the task's own names
    tensors = component_tensors(rows)
    assert list(tensors) == ["form", "fixed.right", "other.right", "short"]
    expected = {
        "form": [1.0, 1.0, NAN, NAN],
        "fixed.right": [0.5, 0.5, NAN, NAN],
        "other.right": [NAN, NAN, 1.0, 1.0],
        "short": [NAN, NAN, NAN, NAN],
    }
    for name, values in expected.items():
        torch.testing.assert_close(tensors[name], torch.tensor(values), equal_nan=True)
    rewards = Rewards({"right": 1.0, "other.right": 0.25, "form": 2.0, "short": 9.0}, BOTH)
    assert rewards.weights == {"form": 2.0, "fixed.right": 1.0, "other.right": 0.25, "short": 9.0}
    assert rewards.combine(tensors, group_size=2).tolist() == [2.5, 2.5, 0.25, 0.25]


def test_names_do_not_depend_on_which_tasks_a_batch_has() -> None:
    only_one = component_tensors(score_completions(BOTH, prompt_of("other"), ["c"]))
    assert list(only_one) == ["form", "fixed.right", "other.right", "short"]


def test_plain_mappings_keep_their_names() -> None:
    tensors = component_tensors([{"form": 1.0}, {"form": None}])
    assert tensors["form"][0] == 1.0
    assert math.isnan(tensors["form"][1])
    assert tensors["form"].dtype == torch.float32


def test_weights_can_be_set_saved_and_restored() -> None:
    rewards = Rewards(None, FIXED)
    assert rewards.weights == {"form": 1.0, "right": 1.0}
    rewards.set_weight("form", 0.25)
    rewards.set_weight("fixed.right", 3)
    state = rewards.state_dict()
    assert state == {"form": 0.25, "right": 3.0}
    other = Rewards(None, FIXED)
    other.load_state_dict(state)
    rewards.set_weight("form", 7.0)  # the saved state is no view
    assert other.weights == {"form": 0.25, "right": 3.0}
    with pytest.raises(ValueError, match=r"saved reward weights are of \['form'\]"):
        other.load_state_dict({"form": 1.0})


def test_weights_that_fit_no_component_or_miss_one() -> None:
    with pytest.raises(ValueError, match=r"has \['style'\], which no task gives; .*fixed.form"):
        Rewards({"form": 1, "right": 1, "style": 1}, FIXED)
    with pytest.raises(ValueError, match=r"lacks \['fixed.right'\]"):
        Rewards({"form": 1.0}, FIXED)
    with pytest.raises(ValueError, match=r"lacks \['other.right'\]"):
        Rewards({"form": 1.0, "fixed.right": 1.0, "short": 0.0}, BOTH)
    with pytest.raises(ValueError, match="form=nan: give a finite number"):
        Rewards({"form": NAN, "right": 1.0}, FIXED)
    with pytest.raises(ValueError, match="form=inf"):
        Rewards(None, FIXED).set_weight("form", math.inf)
    with pytest.raises(ValueError, match="'style' is no component"):
        Rewards(None, FIXED).set_weight("style", 1.0)
    with pytest.raises(ValueError, match=r"no weight for \['style'\]"):
        Rewards(None, FIXED).combine({"style": torch.zeros(2)}, group_size=2)
    with pytest.raises(ValueError, match="3 rewards are not groups of group_size=2"):
        Rewards(None, FIXED).combine({"form": torch.zeros(3)}, group_size=2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"form": 1.0}, r"returned \['form'\] where \['form', 'right'\] are declared"),
        ({"form": 1.0, "right": 0.0, "x": 1.0}, r"returned \['form', 'right', 'x'\]"),
        (0.5, "returned 0.5 where"),
        (None, "returned None where"),
        ({"form": 1.0, "right": NAN}, "gave right=nan; return a number from 0 to 1"),
        ({"form": 1.0, "right": math.inf}, "gave right=inf"),
        ({"form": 1.5, "right": 0.0}, "gave form=1.5"),
        ({"form": -0.1, "right": 0.0}, "gave form=-0.1"),
        ({"form": "1", "right": 0.0}, "gave form='1'"),
    ],
)
def test_what_a_task_must_not_return(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score_completions({"fixed": Fixed(answer)}, prompt_of("fixed"), ["the text"])
    assert "test_rewards.Fixed.score" in str(caught.value)
    assert "prompt 'fixed-1' of task 'fixed', completion 'the text'" in str(caught.value)


def test_a_task_that_raises_stops_the_run_with_its_name_and_the_row() -> None:
    fault = KeyError("gold")
    with pytest.raises(RewardError) as caught:
        score_completions({"fixed": Fixed(fault)}, prompt_of("fixed"), ["x" * 2000])
    message = str(caught.value)
    assert "Fixed.score raised KeyError: 'gold' (in score, " in message
    assert "prompt 'fixed-1'" in message
    assert "'" + "x" * 500 + "...'" in message
    assert caught.value.__cause__ is fault


def test_a_users_scorer_is_named() -> None:
    def my_reward(prompt: Any, completion: str, **columns: Any) -> float:
        return 1 / 0

    task = Rows("unused.jsonl", my_reward)
    prompt = Prompt(id="rows-1", task="rows", text="?", columns={"prompt": "?"})
    with pytest.raises(RewardError, match=r"Rows.score \(.*my_reward\) raised ZeroDivisionError"):
        score_completions({"rows": task}, prompt, ["text"])


def test_a_prompt_of_no_known_task() -> None:
    with pytest.raises(RewardError, match=r"is of task 'maths', which is not among \['fixed'\]"):
        score_completions(FIXED, prompt_of("maths"), ["text"])


def test_booleans_and_numpy_scalars_count_as_numbers() -> None:
    task = Fixed({"form": True, "right": np.float32(0.5)})
    (scores,) = score_completions({"fixed": task}, prompt_of("fixed"), ["text"])
    assert scores == {"form": 1.0, "right": 0.5}
    assert all(isinstance(value, float) for value in scores.values())


async def judge(prompt, completion, *, answer):
    waiting.append(completion)
    await asyncio.sleep(0.01)
    together.append(len(waiting))
    return None if completion == "abstain" else float(completion == answer)


waiting: list[str] = []
together: list[int] = []


def test_asynchronous_rewards_are_asked_all_at_once_and_answer_in_order(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    task = Rows(str(path), judge, validation_fraction=0.0)
    prompts = sorted(task.prompts("train", 2, seed=0), key=lambda p: p.columns["answer"])
    texts = [("1", "x"), ("abstain", "2")]
    rollouts = [
        Rollout(prompt, (), tuple(Completion((), t, torch.zeros(0), "stop") for t in group))
        for prompt, group in zip(prompts, texts, strict=True)
    ]
    found = score_rollouts({"rows": task}, rollouts)
    assert [[s["reward"] for s in group] for group in found] == [[1.0, 0.0], [None, 1.0]]
    assert together == [4] * 4

    async def inside_a_running_loop():
        return score_rollouts({"rows": task}, rollouts)

    assert asyncio.run(inside_a_running_loop()) == found


async def fails(prompt, completion, **columns):
    raise KeyError("no such judge")


async def too_much(prompt, completion, **columns):
    return 2.0


@pytest.mark.parametrize(
    ("scorer", "message"),
    [(fails, r"Rows\.score.*fails\) raised KeyError"), (too_much, "gave reward=2.0")],
)
def test_faults_of_asynchronous_rewards_are_named(tmp_path, scorer, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    task = Rows(str(path), scorer, validation_fraction=0.0)
    (prompt,) = task.prompts("train", 1, seed=0)
    with pytest.raises(RewardError, match=message):
        score_completions({"rows": task}, prompt, ["text"])
