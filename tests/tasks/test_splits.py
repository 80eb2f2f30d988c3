"""Splits by hash: stable, in the right proportion."""

import hashlib
from collections import Counter

import pytest

from tropism.tasks.splits import check_split, split_of


def test_the_split_is_a_function_of_the_text_alone() -> None:
    for text in ("a", "b", "what is 3 + 4?"):
        position = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
        expected = "train" if position >= 0.2 else "validation" if position < 0.1 else "test"
        assert split_of(text) == expected


def test_shares() -> None:
    held_out = {"validation": 0.3, "test": 0.05}
    count = Counter(split_of(f"question {i}", held_out) for i in range(10_000))
    assert count["validation"] == pytest.approx(3000, abs=150)  # 3 standard deviations: 137
    assert count["test"] == pytest.approx(500, abs=70)
    assert set(Counter(split_of(str(i), {}) for i in range(50))) == {"train"}


def test_unknown_split() -> None:
    check_split("test")
    with pytest.raises(ValueError, match="split='dev': choose from"):
        check_split("dev")
