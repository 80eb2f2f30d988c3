"""pass@k and maj@k against every subset of the samples, and by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tropism.evaluation.pass_at_k import maj_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_mean_over_all_subsets(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        verdicts = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(verdicts, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_by_hand() -> None:
    # 10 samples, 3 right: 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)  # the mean
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == 1.0


def test_pass_at_k_of_many_samples_neither_overflows_nor_loses_digits() -> None:
    exact = 1 - math.comb(990, 100) / math.comb(1000, 100)
    assert pass_at_k(1000, 10, 100) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c} right among {n}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "verdicts", "expected"),
    [
        (["a", "b", "a"], [1, 0, 1], 1.0),
        (["a", "b", "b"], [1, 0, 0], 0.0),
        (["a", "b"], [1, 0], 0.5),  # a tie: either answer is chosen half of the time
        (["a", "b", "c"], [1, 0, 0], 1 / 3),
        (["a", None, None], [1, 0, 0], 1.0),  # what answers nothing has no vote
        ([None, None], [0, 0], 0.0),
        (["a", "a", "b"], [1, 0, 0], 0.5),  # one of the two has the right form
    ],
)
def test_votes_by_hand(answers: list[str | None], verdicts: list[float], expected: float) -> None:
    assert maj_at_k(answers, verdicts, len(answers)) == pytest.approx(expected)


def test_votes_of_fewer_than_all_are_the_mean_over_disjoint_blocks() -> None:
    answers, verdicts = ["a", "a", "b", "b", "a"], [1, 1, 0, 0, 1]
    assert maj_at_k(answers, verdicts, 1) == pytest.approx(3 / 5)  # the mean
    assert maj_at_k(answers, verdicts, 2) == pytest.approx(
        1 / 2
    )  # (a, a), (b, b); the last is left


def test_votes_do_not_depend_on_what_answers_are_called() -> None:
    draw = random.Random(0)
    for _ in range(50):
        answers = draw.choices("abc", k=6)
        verdicts = [float(answer == "a") for answer in answers]
        renamed = [{"a": "x", "b": "a", "c": "b"}[answer] for answer in answers]
        assert maj_at_k(renamed, verdicts, 3) == maj_at_k(answers, verdicts, 3)


def test_votes_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="maj@3 of 2 answers"):
        maj_at_k(["a", "b"], [1, 0], 3)
    with pytest.raises(ValueError, match="2 answers and 1 verdicts"):
        maj_at_k(["a", "b"], [1], 1)
