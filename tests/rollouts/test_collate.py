import torch

from tropism.rollouts.collate import micro_batches
from tropism.types import Completion, Prompt, Rollout


def rollout(prompt: tuple[int, ...], *completions: tuple[int, ...]) -> Rollout:
    return Rollout(
        Prompt(id=str(prompt), task="t", text="x"),
        prompt,
        tuple(Completion(c, "", torch.zeros(len(c)), "stop") for c in completions),
    )


ROLLOUTS = [rollout((1, 2, 3), (10,), (11, 12)), rollout((4,), (13, 14, 15, 16), (17, 18))]


def cut(*keep: bool, max_tokens: int = 100):
    return list(
        micro_batches(ROLLOUTS, keep=torch.tensor(keep), max_tokens=max_tokens, pad_token_id=0)
    )


def test_hand_built_batches():
    one, two = cut(True, True, True, False)
    assert one.rows.tolist() == [1, 0]  # longest first
    assert one.prompt.tolist() == [1, 2, 3]
    assert one.targets.tolist() == [[11, 12], [10, 0]]
    assert one.mask.tolist() == [[True, True], [True, False]]
    assert two.rows.tolist() == [2]
    assert two.prompt.tolist() == [4]
    assert two.targets.tolist() == [[13, 14, 15, 16]]


def test_budget_bounds_tokens_and_keeps_every_row():
    parts = cut(True, True, True, True, max_tokens=6)
    assert sorted(row for part in parts for row in part.rows.tolist()) == [0, 1, 2, 3]
    assert all(part.prompt.numel() + part.targets.numel() <= 6 for part in parts)


def test_a_completion_longer_than_the_budget_stands_alone():
    assert len(cut(True, True, True, True, max_tokens=1)) == 4


def test_nothing_to_train_on():
    assert cut(False, False, False, False) == []
