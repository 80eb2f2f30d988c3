import pytest
import torch

from tropism.rollouts.collate import micro_batches, packs, training_batches
from tropism.types import Completion, Group, MicroBatch, Pack, Prompt, Rollout


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


def pack(*keep: bool, max_tokens: int = 100, rollouts=ROLLOUTS) -> list[Pack]:
    return list(packs(rollouts, keep=torch.tensor(keep), max_tokens=max_tokens, pad_token_id=0))


def test_hand_built_pack():
    (one,) = pack(True, True, True, False)
    assert one.rows.tolist() == [1, 0, 2]
    # The last token of a completion is only predicted; of row 0 nothing runs.
    assert one.input_ids.tolist() == [1, 2, 3, 11, 4, 13, 14, 15]
    assert one.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert one.predicts.tolist() == [2, 3, 2, 4, 5, 6, 7]
    assert one.groups == (Group(0, 3, (1, 0)), Group(4, 1, (3,)))
    assert one.targets.tolist() == [[11, 12, 0, 0], [10, 0, 0, 0], [13, 14, 15, 16]]
    assert one.mask.sum(dim=1).tolist() == [2, 1, 4]
    assert one.targets[one.mask].tolist() == [11, 12, 10, 13, 14, 15, 16]


def test_a_prompt_without_kept_rows_is_not_laid_down():
    (one,) = pack(False, False, False, True)
    assert one.input_ids.tolist() == [4, 17]
    assert one.groups == (Group(0, 1, (1,)),)
    assert one.rows.tolist() == [3]
    assert pack(False, False, False, False) == []


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (9, [([1, 0, 2, 3], [1, 2, 3, 11, 4, 13, 14, 15, 17])]),
        (5, [([1, 0], [1, 2, 3, 11]), ([2, 3], [4, 13, 14, 15, 17])]),
        # The prompt is laid down again where its completions go on in another pack.
        (4, [([1, 0], [1, 2, 3, 11]), ([2], [4, 13, 14, 15]), ([3], [4, 17])]),
        (1, [([1], [1, 2, 3, 11]), ([0], [1, 2, 3]), ([2], [4, 13, 14, 15]), ([3], [4, 17])]),
    ],
)
def test_budget_of_packs(max_tokens, expected):
    parts = pack(True, True, True, True, max_tokens=max_tokens)
    assert [(part.rows.tolist(), part.input_ids.tolist()) for part in parts] == expected


def test_packs_are_alike_in_size():
    alike = rollout((1,), *[(2, 3, 4, 5, 6)] * 10)
    parts = pack(*[True] * 10, max_tokens=40, rollouts=[alike])
    assert [len(part.rows) for part in parts] == [5, 5]  # not 9 and 1
    # A prompt counts in each pack that it is laid down in: 6 + 4 x 2 tokens, not 16 and 12.
    long = [rollout((1, 2, 3, 4, 5, 6), *[(7, 8, 9)] * 8)] * 2
    parts = pack(*[True] * 16, max_tokens=16, rollouts=long)
    assert [len(part.input_ids) for part in parts] == [14] * 4
    # ... and none is cut where the group fits.
    parts = pack(*[True] * 16, max_tokens=22, rollouts=long)
    assert [len(part.input_ids) for part in parts] == [22] * 2


@pytest.mark.parametrize("max_tokens", [1, 17, 40, 64, 1000])
def test_each_completion_is_predicted_from_right_behind_its_prompt(max_tokens):
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for _ in range(5):
        lengths = torch.randint(1, 9, (5,), generator=generator).tolist()
        ids = [tuple(torch.randint(1, 50, (n,), generator=generator).tolist()) for n in lengths]
        rollouts.append(rollout(ids[0], *ids[1:]))
    keep = torch.rand(20, generator=generator) < 0.7
    seen = []
    for part in pack(*keep.tolist(), max_tokens=max_tokens, rollouts=rollouts):
        assert len(part.input_ids) <= max_tokens or len(part.rows) == 1
        start = 0
        for row, num in zip(part.rows.tolist(), part.mask.sum(dim=1).tolist(), strict=True):
            prompt = rollouts[row // 4].prompt_token_ids
            tokens = rollouts[row // 4].completions[row % 4].token_ids
            assert num == len(tokens)
            states = part.predicts[start : start + num]
            assert part.input_ids[states].tolist() == [prompt[-1], *tokens[:-1]]
            first = len(prompt) - 1
            assert part.position_ids[states].tolist() == list(range(first, first + num))
            assert part.targets[part.mask][start : start + num].tolist() == list(tokens)
            start += num
        seen += part.rows.tolist()
    assert sorted(seen) == keep.nonzero().squeeze(1).tolist()


def test_the_model_decides_between_packs_and_micro_batches():
    options = {"keep": torch.ones(4, dtype=torch.bool), "max_tokens": 10, "pad_token_id": 0}
    parts = list(training_batches(ROLLOUTS, can_pack=True, **options))
    assert [type(part) for part in parts] == [Pack]
    parts = list(training_batches(ROLLOUTS, can_pack=False, **options))
    assert [type(part) for part in parts] == [MicroBatch, MicroBatch]
