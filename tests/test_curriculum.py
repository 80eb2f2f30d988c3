"""The order of training prompts by pass rate."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tropism.mixing import Curriculum, Epochs, OrderedEpochs
from tropism.types import Prompt

RATES = {f"p{i}": i / 8 for i in range(9)}  # 0, 1/8, ..., 1
POOL = [Prompt(id=name, task="t", text=name) for name in RATES]


def ordered(curriculum: Curriculum, fade: int | None = None, key: str = "0/t") -> OrderedEpochs:
    return OrderedEpochs(POOL, key, rates=RATES, curriculum=curriculum, fade_rollouts=fade)


def drawn(epochs: Epochs, num_rollouts: int, per_rollout: int = 3) -> list[list[str]]:
    batches = []
    for rollout in range(num_rollouts):
        batch: list[Prompt] = []
        for _ in range(per_rollout):
            batch.append(epochs.draw(batch, rollout))
        batches.append([prompt.id for prompt in batch])
    return batches


def flat(batches: list[list[str]]) -> list[str]:
    return [prompt for batch in batches for prompt in batch]


def test_easy_and_hard_first_are_the_pass_rates_in_order() -> None:
    assert flat(drawn(ordered("hard_first"), 3)) == [f"p{i}" for i in range(9)]
    assert flat(drawn(ordered("easy_first"), 3)) == [f"p{i}" for i in reversed(range(9))]


def test_mixed_first_goes_outwards_from_one_half() -> None:
    order = flat(drawn(ordered("mixed_first"), 3))
    assert order[0] == "p4"
    pairs = [set(order[i : i + 2]) for i in range(1, 9, 2)]
    assert pairs == [{"p3", "p5"}, {"p2", "p6"}, {"p1", "p7"}, {"p0", "p8"}]


def test_equal_rates_come_by_chance_and_not_as_the_pool_has_them() -> None:
    even = dict.fromkeys(RATES, 0.5)
    orders = {
        tuple(flat(drawn(OrderedEpochs(POOL, str(seed), rates=even, curriculum="easy_first",
                                       fade_rollouts=None), 3)))
        for seed in range(5)
    }  # fmt: skip
    assert len(orders) == 5


@pytest.mark.parametrize("curriculum", ["easy_first", "hard_first", "mixed_first"])
@pytest.mark.parametrize("fade", [None, 4, 100])
@pytest.mark.parametrize("per_rollout", [1, 4, 9])
def test_every_epoch_is_complete_and_no_rollout_has_a_prompt_twice(
    curriculum: Curriculum, fade: int | None, per_rollout: int
) -> None:
    batches = drawn(ordered(curriculum, fade), 36, per_rollout)
    assert all(len(set(batch)) == per_rollout for batch in batches)
    prompts = flat(batches)
    for start in range(0, len(prompts), 9):
        assert sorted(prompts[start : start + 9]) == sorted(RATES)


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    for fade in (None, 6):
        short, long = (drawn(ordered("hard_first", fade), num) for num in (7, 30))
        assert long[:7] == short
    other = drawn(ordered("hard_first", 6, key="1/t"), 30)
    assert other != long


def test_the_order_fades() -> None:
    """Mean place, within an epoch of 9, of the easiest prompt: first of all, then anywhere."""
    draws: Counter[str] = Counter()
    for seed in range(300):
        epochs = ordered("easy_first", fade=9, key=str(seed))
        prompts = flat(drawn(epochs, 18, 1))
        assert prompts[0] == "p8"  # rollout 0: strictly in order
        draws["middle"] += prompts[4] == "p4"  # in order with probability 5/9 in each rollout
        draws["later"] += prompts[9:].index("p8")  # rollout 9 on: by chance
    assert 0.15 < draws["middle"] / 300 < 0.6
    assert draws["later"] / 300 == pytest.approx(4.0, abs=3 * 2.58 / 300**0.5)


def test_without_a_curriculum_the_order_is_what_it_was() -> None:
    """Reference: a shuffle keyed by (key, epoch), popped from the end."""
    reference: Callable[[int], list[str]] = lambda epoch: [p.id for p in shuffled(epoch)]  # noqa: E731
    assert flat(drawn(Epochs(POOL, "0/t"), 6)) == reference(0) + reference(1)


def shuffled(epoch: int) -> list[Prompt]:
    pool = list(POOL)
    random.Random(f"0/t/{epoch}").shuffle(pool)
    return pool[::-1]
