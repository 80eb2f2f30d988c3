"""Which completions are probed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from tropism.measurements.probe_rows import ProbeRows, choose_probe_rows

ADVANTAGES = torch.tensor(
    [
        [0.0, 0.0, 0.0, 0.0],
        [3.0, -1.0, -1.0, -1.0],
        [-2.0, 1.0, 2.0, -1.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
).flatten()


def choose(advantages: Tensor = ADVANTAGES, seed: int = 0, **options) -> list[ProbeRows]:
    settings = {"group_size": 4, "num_prompts": 2, "num_completions": 2, **options}
    return choose_probe_rows(advantages, rng=np.random.default_rng(seed), **settings)


def test_top_and_bottom_of_groups_with_signal() -> None:
    first, second = choose()
    assert first.prompt == 1
    assert 4 in first.rows
    assert first.share == pytest.approx((9 + 1) / 12)
    assert second == ProbeRows(prompt=2, rows=(8, 10), share=8 / 10)


def test_ties_are_broken_by_chance() -> None:
    others = Counter(next(r for r in choose(seed=s)[0].rows if r != 4) for s in range(600))
    assert set(others) == {5, 6, 7}
    assert min(others.values()) > 150


def test_prompts_are_drawn_uniformly() -> None:
    drawn = Counter(choose(seed=s, num_prompts=1)[0].prompt for s in range(400))
    assert set(drawn) == {1, 2}
    assert min(drawn.values()) > 160


def test_the_odd_one_is_from_the_top() -> None:
    assert choose(num_completions=3)[1].rows == (8, 9, 10)


def test_whole_groups() -> None:
    for choice in ("contrast", "uniform"):
        for number in (4, 9):
            first, second = choose(num_prompts=5, num_completions=number, choice=choice)
            assert first == ProbeRows(1, (4, 5, 6, 7), 1.0)
            assert second == ProbeRows(2, (8, 9, 10, 11), 1.0)


def test_uniform_sums_to_the_group() -> None:
    sums = [sum(float(ADVANTAGES[r]) ** 2 for r in choose(seed=s, choice="uniform")[0].rows)
            for s in range(4000)]  # fmt: skip
    assert np.mean(sums) * 4 / 2 == pytest.approx(12, rel=0.05)


def test_chance_is_the_generators() -> None:
    assert choose(seed=3) == choose(seed=3)
    assert any(choose(seed=3) != choose(seed=s) for s in range(10))


def test_no_signal_no_rows() -> None:
    assert choose(torch.zeros(8)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"num_completions": 1}, "num_completions=1"),
        ({"group_size": 3}, "16 advantages .* group_size=3"),
        ({"choice": "best"}, "'best'"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    # Beartype, active in tests only, refuses an unknown choice first, with an error of its own.
    with pytest.raises(ValueError if "choice" not in options else Exception, match=message):
        choose(**options)
