"""Each completion has its own verdict, of its own row."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tropism.objective.advantages import component_advantages, group_advantages
from tropism.rewards import RewardError, Rewards, component_tensors, score_completions
from tropism.scoring import score_rollouts
from tropism.tasks.rows import Rows
from tropism.types import Completion, Prompt, Rollout

TEXTS = ["a", "bb", "ccc", "dddd"]


def rows(path: Path, scorer: Callable[..., Any], num: int = 1, **settings: Any) -> Rows:
    lines = [{"prompt": f"question {i}", "id": f"row-{i}", "gold": i} for i in range(num)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Rows(str(path), scorer, validation_fraction=0, **settings)


def rollout_of(prompt: Prompt, texts: Sequence[str]) -> Rollout:
    return Rollout(prompt, (1,), tuple(Completion((1,), t, torch.zeros(1), "stop") for t in texts))


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    "verdict",
    [[0.5], [0.5] * 4, (0.5,), np.array([0.5]), torch.tensor([0.5]), torch.tensor(0.5)],
    ids=repr,
)
def test_what_is_no_single_number_is_an_error_that_names_the_function(
    tmp_path: Path, verdict: Any
) -> None:
    def my_reward(prompt: Any, completion: str, **columns: Any) -> Any:
        return verdict

    task = rows(tmp_path / "a.jsonl", my_reward)
    (prompt,) = task.prompts("train", 1, seed=0)
    with pytest.raises(RewardError, match=r"my_reward\) gave reward=.*; return a number from 0"):
        score_completions({"rows": task}, prompt, TEXTS)


@pytest.mark.fault(5)
def test_four_completions_have_four_verdicts(tmp_path: Path) -> None:
    def length(prompt: Any, completion: str, **columns: Any) -> float:
        return len(completion) / 8

    task = rows(tmp_path / "a.jsonl", length)
    (prompt,) = task.prompts("train", 1, seed=0)
    (scores,) = score_rollouts({"rows": task}, [rollout_of(prompt, TEXTS)])
    assert component_tensors(scores)["reward"].tolist() == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.fault(6)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_each_completion_is_scored_with_the_columns_of_its_own_row(
    tmp_path: Path, is_asynchronous: bool
) -> None:
    calls: list[tuple[str, str, str, int]] = []

    def score(prompt: str, completion: str, *, id: str, gold: int) -> float:
        calls.append((prompt, completion, id, gold))
        return float(completion == f"answer {gold}")

    async def later(prompt: str, completion: str, *, id: str, gold: int) -> float:
        return score(prompt, completion, id=id, gold=gold)

    task = rows(tmp_path / "a.jsonl", later if is_asynchronous else score, num=6)
    prompts = task.prompts("train", 6, seed=3)
    order = [prompt.columns["gold"] for prompt in prompts]
    assert sorted(order) != order  # shuffled
    # The first answer of each group is right, the second is the next row's.
    scores = score_rollouts(
        {"rows": task},
        [
            rollout_of(p, [f"answer {g}", f"answer {g + 1}"])
            for p, g in zip(prompts, order, strict=True)
        ],
    )
    assert [[one["reward"] for one in group] for group in scores] == [[1.0, 0.0]] * 6
    assert calls == [
        (f"question {g}", f"answer {g + n}", f"row-{g}", g) for g in order for n in (0, 1)
    ]


@pytest.mark.fault(6)
@pytest.mark.parametrize("name", ["completion", "reply"])
def test_a_column_with_the_name_of_an_argument_is_refused(tmp_path: Path, name: str) -> None:
    def scorer(question: str, reply: str, **columns: Any) -> float:
        return 1.0

    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p", name: "mine"}) + "\n")
    with pytest.raises(ValueError, match=rf"line 1: the columns \['{name}'\] bear the names"):
        Rows(str(path), scorer).prompts("train", 1, seed=0)


@pytest.mark.fault(9)
def test_a_none_from_one_of_two_rewards_takes_the_mean_of_its_peers(tmp_path: Path) -> None:
    def scorer(prompt: str, completion: str, **columns: Any) -> dict[str, float | None]:
        style = {"a": 1.0, "bb": 0.5, "ccc": 0.0, "dddd": None}[completion]
        return {"right": float(completion in ("a", "dddd")), "style": style}

    task = rows(tmp_path / "a.jsonl", scorer, components=("right", "style"))
    (prompt,) = task.prompts("train", 1, seed=0)
    tasks = {"rows": task}
    components = component_tensors(score_completions(tasks, prompt, TEXTS))
    assert components["style"].isnan().tolist() == [False, False, False, True]
    rewards = Rewards(None, tasks)
    # The style of the three that were judged is 0.5 on average.
    combined = rewards.combine(components, group_size=4)
    assert combined.tolist() == [2.0, 0.5, 0.0, 1.5]
    advantages = group_advantages(combined, group_size=4, scale="none").values
    assert advantages.tolist() == [1.0, -0.5, -1.0, 0.5]
    # Normalised first: right's scores are +-z, those of style 1, 0, -1 and 0.
    z = 0.5 / (1 / 3) ** 0.5
    total = torch.tensor([z + 1, -z, -z - 1, z])
    found = component_advantages(components, weights=rewards.weights, group_size=4).values
    torch.testing.assert_close(found, total / total.std(), rtol=1e-3, atol=1e-3)
