"""The numbers of a step by hand: spreads within groups and across, lengths, groups of equals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tropism.experience import Experience
from tropism.measurements import metrics as names
from tropism.measurements.step_metrics import Sums, Update, step_metrics
from tropism.objective.settings import Objective
from tropism.rewards import Rewards
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Scores, Split, Task
from tropism.types import Completion, FinishReason, Prompt, Rollout, RolloutBatch

UPDATE = Update(learning_rate=0.01)


def completion(text: str, *, length: int, finish_reason: FinishReason = "stop") -> Completion:
    return Completion(tuple(range(length)), text, torch.zeros(length), finish_reason)


def batch_of(groups: Sequence[Sequence[Completion]], rewards: Sequence[float]) -> RolloutBatch:
    values = torch.tensor(rewards)
    return RolloutBatch(
        rollout=0,
        rollouts=[
            Rollout(Prompt(id=str(i), task="digits", text="x"), (1,), tuple(group))
            for i, group in enumerate(groups)
        ],
        components={},
        rewards=values,
        advantages=torch.zeros(len(rewards)),
        zero_variance=values.view(len(groups), -1).std(dim=1) == 0,
    )


def metrics_of(batch: RolloutBatch, update: Update = UPDATE) -> dict[str, float | None]:
    return step_metrics(batch, update, has_reference=False, trainable_params=7)


@pytest.mark.fault(4)
def test_spread_within_groups_and_across_the_batch_have_names_of_their_own() -> None:
    answers = [completion("x", length=1)] * 2
    metrics = metrics_of(batch_of([answers, answers], [0.0, 0.0, 5.0, 5.0]))
    assert metrics["reward_std"] == 0.0
    assert metrics[names.REWARD_BATCH_STD] == pytest.approx((4 * 2.5**2 / 3) ** 0.5)
    assert names.PER_ROLLOUT["reward_std"] == names.REWARD_GROUP_STD != names.REWARD_BATCH_STD
    assert metrics["loss"] is None  # no step, so no loss: not one of 0
    assert metrics["frac_reward_zero_std"] == 1.0


@pytest.mark.fault(12)
@pytest.mark.parametrize("update", [UPDATE, Update(0.01, num_updates=1, first=Sums(tokens=3))])
def test_lengths_count_what_was_cut_and_masked(update: Update) -> None:
    group = [
        completion("abc", length=3),
        completion("abcdefgh", length=8, finish_reason="length"),
    ]
    metrics = metrics_of(batch_of([group], [0.0, 1.0]), update)
    assert metrics[names.COMPLETION_LENGTH_MAX] == 8
    assert metrics["completion_length"] == 5.5
    assert metrics["tokens"] == 11
    assert metrics["clipped_ratio"] == 0.5


def test_effective_share_of_the_ratios_by_hand() -> None:
    batch = batch_of([[completion("x", length=4)] * 2], [0.0, 1.0])
    # Ratios 2, 1, 1, 0: (2 + 1 + 1)^2 / (4 * (4 + 1 + 1)); one of them left its range.
    first = Sums(tokens=4, ratio=4.0, ratio_squared=6.0, corrected=1)
    update = Update(0.01, num_updates=1, first=first)
    metrics = step_metrics(
        batch, update, has_reference=False, trainable_params=7, corrects_mismatch=True
    )
    assert metrics[names.MISMATCH_EFFECTIVE] == pytest.approx(16 / 24)
    assert metrics[names.MISMATCH_CORRECTED] == 0.25
    assert Sums(tokens=5, ratio=5.0, ratio_squared=5.0).effective_share() == 1.0
    assert metrics_of(batch, update)[names.MISMATCH_EFFECTIVE] is None  # nothing is corrected


class Digits(Task):
    """The completion is two digits; each is a component."""

    name = "digits"
    components = ("value", "other")
    primary = "value"

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [Prompt(id=str(i), task=self.name, text="x") for i in range(num)]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return {"value": float(completion[0]), "other": float(completion[1])}


class Given:
    """Two answers for each of two prompts."""

    def generate(self, prompts: Sequence[Prompt], **_: object) -> list[Rollout]:
        answers = {"0": ("10", "10"), "1": ("00", "10")}
        return [
            Rollout(p, (1,), tuple(completion(text, length=2) for text in answers[p.id]))
            for p in prompts
        ]


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    "objective",
    [
        Objective(scale="group"),
        Objective(scale="batch"),
        Objective(scale="none"),
        Objective(aggregation="normalize_then_sum"),
        Objective(scale="batch", beta=0.1),
    ],
    ids=["group", "batch", "none", "normalize_then_sum", "batch-kl"],
)
def test_half_of_the_groups_have_no_signal_in_every_mode(objective: Objective) -> None:
    tasks = {"digits": Digits()}
    experience = Experience(
        engine=Given(),  # type: ignore[arg-type]
        tasks=tasks,
        rewards=Rewards(None, tasks),
        objective=objective,
        sampling=Sampling(),
        group_size=2,
        seed=0,
    )
    batch = experience.collect(Digits().prompts("train", 2, 0), rollout=0)
    assert batch.rewards.tolist() == [1.0, 1.0, 0.0, 1.0]
    assert batch.zero_variance.tolist() == [True, False]
    assert batch.advantages[:2].tolist() == [0.0, 0.0]
    assert batch.advantages[2] == -batch.advantages[3] != 0
    assert metrics_of(batch)["frac_reward_zero_std"] == 0.5
