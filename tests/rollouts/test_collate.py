import torch
from tropism.rollouts.collate import micro_batches, sequences
from tropism.types import Completion, Prompt, Rollout


def rollout(prompt: tuple[int, ...], *completions: tuple[int, ...]) -> Rollout:
    return Rollout(
        Prompt(id=str(prompt), task="t", text="x"),
        prompt,
        tuple(Completion(c, "", torch.zeros(len(c)), "stop") for c in completions),
    )


ROLLOUTS = [rollout((1, 2, 3), (10, 11), (12,)), rollout((4,), (13, 14, 15, 16), (17, 18))]


def test_hand_built_batch():
    batch = sequences(ROLLOUTS, keep=torch.tensor([True, False, True, False]))
    (part,) = micro_batches(batch, max_tokens=100, pad_token_id=0)
    assert part.rows.tolist() == [0, 2]
    assert part.input_ids.tolist() == [[1, 2, 3, 10, 11], [4, 13, 14, 15, 16]]
    assert part.targets.tolist() == [[10, 11, 0, 0], [13, 14, 15, 16]]
    assert part.mask.tolist() == [[True, True, False, False], [True] * 4]
    # The state at `positions` must be the one whose next token is the target.
    following = part.input_ids.roll(-1, dims=1).gather(1, part.positions)
    assert torch.equal(following[part.mask], part.targets[part.mask])


def test_budget_bounds_padded_tokens_and_keeps_every_row():
    batch = sequences(ROLLOUTS, keep=torch.ones(4, dtype=torch.bool))
    parts = list(micro_batches(batch, max_tokens=10, pad_token_id=0))
    assert sorted(row for part in parts for row in part.rows.tolist()) == [0, 1, 2, 3]
    assert all(part.input_ids.numel() <= 10 for part in parts)
    lengths = [part.input_ids.shape[1] for part in parts]
    assert lengths == sorted(lengths, reverse=True)


def test_a_sequence_longer_than_the_budget_stands_alone():
    batch = sequences(ROLLOUTS, keep=torch.ones(4, dtype=torch.bool))
    assert len(list(micro_batches(batch, max_tokens=1, pad_token_id=0))) == 4


def test_nothing_to_train_on():
    batch = sequences(ROLLOUTS, keep=torch.zeros(4, dtype=torch.bool))
    assert list(micro_batches(batch, max_tokens=10, pad_token_id=0)) == []
