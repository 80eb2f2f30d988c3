"""Running metrics: counts by batches, abstentions, and sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from tropism.evaluation.metrics import PassRate, TaskScores, baseline_rates, pass_rate
from tropism.evaluation.statistics import wilson_interval
from tropism.tasks.base import Split, Task
from tropism.types import Prompt


class Waiting(Task):
    """Its verifier is asked elsewhere."""

    name = "waiting"
    components: ClassVar = ("right", "short")
    primary = "right"

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [Prompt(id=f"{i}", task="waiting", text=f"{i}") for i in range(num)]

    def score(self, prompt: Prompt, completion: str) -> Awaitable[Mapping[str, float]]:  # type: ignore[override]
        async def judge() -> Mapping[str, float]:
            return {"right": float(completion == prompt.id), "short": 1.0}

        return judge()

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        return {"zero": lambda prompt: "0"}


def test_verdicts_come_in_batches() -> None:
    rate = PassRate()
    rate.update([1.0, None, 0.0])
    rate.update([])
    rate.update([0.5, 1.0])  # half right has not passed
    assert rate.estimate() == wilson_interval(2, 4)
    assert rate.compute()["n"] == 4
    rate.reset()
    rate.update([None])
    assert rate.estimate() is None
    assert math.isnan(rate.compute()["value"])


def test_counts_of_ranks_are_summed() -> None:
    other = {"passed": torch.tensor(5), "judged": torch.tensor(6)}
    asked = iter(other.values())

    def gather(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        return [state, next(asked)]

    rate = PassRate(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    rate.update([1.0, 0.0])
    assert rate.estimate() == wilson_interval(6, 8)
    assert int(rate.judged) == 2  # its own again


def test_confidence() -> None:
    rate = PassRate(confidence=0.5)
    rate.update([1.0, 0.0])
    assert rate.estimate() == wilson_interval(1, 2, 0.5)


def test_scores_of_a_task() -> None:
    scores = TaskScores(Waiting(), torch.device("cpu"))
    scores.update([{"right": 1.0, "short": 0.25}, {"right": 0.0, "short": None}])
    scores.update([{"right": None, "short": 0.75}])
    scores.update([])
    assert scores.passed.estimate() == wilson_interval(1, 2)
    assert scores.component_means() == {"right": 0.5, "short": 0.5}


def test_a_component_that_always_abstains_has_no_mean() -> None:
    scores = TaskScores(Waiting(), torch.device("cpu"))
    scores.update([{"right": 1.0, "short": None}])
    assert scores.component_means() == {"right": 1.0}


def test_pass_rate_leaves_out_abstentions() -> None:
    scores = [{"right": 1.0}, {"right": None}, {"right": 0.0}, {"right": 0.0}]
    assert pass_rate(scores, "right") == wilson_interval(1, 3)
    assert pass_rate([{"right": None}], "right") is None


@pytest.mark.parametrize("num", [1, 4])
def test_baselines_of_a_verifier_that_is_waited_for(num: int) -> None:
    task = Waiting()
    prompts = task.prompts("test", num, 0)
    assert baseline_rates(task, prompts) == {"zero": wilson_interval(1, num)}
