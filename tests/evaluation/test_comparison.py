"""Results from written-down answers: metrics, intervals, differences, corrections, wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from tropism.evaluation.benchmarks import Job, Mode
from tropism.evaluation.comparison import Result, results, wins
from tropism.evaluation.contestants import Base
from tropism.evaluation.report import lines, rows, summary, tables
from tropism.evaluation.statistics import wilson_interval
from tropism.evaluation.suite import Answered
from tropism.measurements.records import TABLES
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Split, Task
from tropism.types import Prompt

BASE, TUNED = Base("base", None), Base("tuned", None, rollout=7, step=9)


class Sums(Task):
    name = "sums"
    components: ClassVar = ("right", "short")
    primary = "right"

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [Prompt(id=f"p{i}", task="sums", text=f"{i}") for i in range(num)]

    def score(self, prompt: Prompt, completion: str) -> Mapping[str, float | None]:
        raise AssertionError("everything is answered and judged already")


def answered(
    model: Base,
    right: Sequence[Sequence[float | None]],
    *,
    benchmark: str = "sums",
    mode: Mode = "greedy",
    ks: tuple[int, ...] = (1,),
    answers: Sequence[Sequence[str | None]] | None = None,
    short: Sequence[Sequence[float | None]] | None = None,
) -> Answered:
    """``right``: [num_prompts][num_samples] verdicts."""
    task = Sums()
    prompts = tuple(task.prompts("test", len(right), 0))
    job = Job(benchmark, "in", "test", task, prompts, mode, len(right[0]), ks, Sampling())
    table: list[dict[str, Any]] = [
        {
            "prompt_id": prompt.id,
            "verdicts": {"right": right[i], "short": short[i] if short else [None] * len(right[i])},
            "answers": None if answers is None else answers[i],
        }
        for i, prompt in enumerate(prompts)
    ]
    return Answered(model, job, tuple(table))


def by_metric(found: Sequence[Result], model: str = "base") -> dict[str, Result]:
    return {r.metric: r for r in found if r.contestant.name == model}


def test_greedy_answers_have_a_wilson_interval_and_components_beside() -> None:
    right = [[1.0], [1.0], [0.0], [1.0], [None]]
    short = [[0.5], [None], [1.0], [0.0], [1.0]]
    found = by_metric(results([answered(BASE, right, short=short)], base="base", seed=0))
    assert found["pass"].estimate == wilson_interval(3, 4)  # who abstained has not judged
    assert found["components/short"].estimate.value == pytest.approx(2.5 / 4)
    assert found["components/short"].is_component
    assert found["pass"].comparison is None


def test_samples_give_pass_at_k_and_votes() -> None:
    right = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4]
    answers = [["3", "4", "4", None], ["5", "5", "6", "7"], [None] * 4]
    one = answered(BASE, right, mode="sampled", ks=(1, 2, 4), answers=answers)
    found = by_metric(results([one], base="base", seed=0))
    assert list(found) == ["pass@1", "pass@2", "maj@2", "pass@4", "maj@4"]
    assert found["pass@1"].estimate.value == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    # 1 - C(3, 2) / C(4, 2) = 1/2; 1 - C(2, 2) / C(4, 2) = 5/6
    assert found["pass@2"].estimate.value == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert found["pass@4"].estimate == wilson_interval(2, 3)  # each prompt is 0 or 1
    assert found["maj@2"].values == pytest.approx({"p0": 0.25, "p1": 0.5, "p2": 0.0})
    assert found["maj@4"].values == {"p0": 0.0, "p1": 1.0, "p2": 0.0}
    low, high = found["pass@1"].estimate.low, found["pass@1"].estimate.high
    assert 0 <= low < found["pass@1"].estimate.value < high <= 0.5
    assert found["pass@1"].estimate.n == 3  # prompts, not samples


def test_no_sample_right_is_not_taken_for_certain_failure() -> None:
    found = results([answered(BASE, [[0.0, 0.0]] * 20, mode="sampled")], base="base", seed=0)
    assert found[0].estimate == wilson_interval(0, 20)


def test_difference_to_the_base_is_paired_and_tested() -> None:
    base = [[0.0]] * 6 + [[1.0]] * 4
    tuned = [[1.0]] * 6 + [[1.0]] * 4
    found = results([answered(BASE, base), answered(TUNED, tuned)], base="base", seed=0)
    compared = by_metric(found, "tuned")["pass"].comparison
    assert compared is not None
    assert compared.difference.value == pytest.approx(0.6)
    # All six prompts that differ do so in one direction: 2 of 2^6 sign patterns are as extreme.
    assert compared.p == pytest.approx(2 / 2**6)
    assert compared.p_corrected == compared.p  # one benchmark, one test
    assert compared.difference.low > 0.2
    assert compared.difference.high <= 1.0


def test_prompts_are_matched_by_their_ids() -> None:
    first, second = answered(BASE, [[1.0], [0.0], [0.0]]), answered(TUNED, [[1.0], [0.0], [0.0]])
    turned = Answered(TUNED, second.job, second.rows[::-1])
    found = results([first, turned], base="base", seed=0)
    compared = by_metric(found, "tuned")["pass"].comparison
    assert compared is not None
    assert (compared.difference.value, compared.p) == (0.0, 1.0)
    # None of 3 prompts differs; as many as Wilson's 0 of 3 allows could.
    unseen = wilson_interval(0, 3).high
    assert compared.difference.low == pytest.approx(-unseen)
    assert compared.difference.high == pytest.approx(unseen)


def test_p_values_are_corrected_over_benchmarks_model_by_model_and_metric_by_metric() -> None:
    all_base, all_tuned = [[0.0]] * 8, [[1.0]] * 8
    half = [[1.0]] * 5 + [[0.0]] * 3
    found = results(
        [
            answered(BASE, all_base, benchmark="a"),
            answered(BASE, all_base, benchmark="b"),
            answered(BASE, all_base, benchmark="c", mode="sampled"),
            answered(TUNED, all_tuned, benchmark="a"),
            answered(TUNED, half, benchmark="b"),
            answered(TUNED, all_tuned, benchmark="c", mode="sampled"),
        ],
        base="base",
        seed=0,
    )
    tuned = {r.job.benchmark: r.comparison for r in found if r.contestant is TUNED}
    a, b, c = tuned["a"], tuned["b"], tuned["c"]
    assert a is not None
    assert b is not None
    assert c is not None
    assert (a.p, b.p) == (pytest.approx(2 / 2**8), pytest.approx(2 / 2**5))
    assert a.p_corrected == pytest.approx(2 * 2 / 2**8)  # the smaller of two
    assert b.p_corrected == pytest.approx(2 / 2**5)
    assert c.p_corrected == c.p  # the only one with pass@1


def test_wins_count_each_benchmark_once_and_leave_ties_out() -> None:
    worse, better = [[0.0], [0.0], [1.0]], [[1.0], [1.0], [1.0]]
    pairs = {"a": (worse, better), "b": (worse, better), "c": (better, worse), "d": (worse, worse)}
    both = [
        one
        for name, (base, tuned) in pairs.items()
        for one in (
            answered(BASE, base, benchmark=name, short=base),
            answered(TUNED, tuned, benchmark=name, short=base),
            answered(BASE, better, benchmark=name, mode="sampled"),
            answered(TUNED, worse, benchmark=name, mode="sampled"),
        )
    ]
    found = results(both, base="base", seed=0)
    (count,) = wins(found)
    assert (count.contestant, count.wins, count.losses, count.ties) == (TUNED, 2, 1, 1)
    assert count.share == wilson_interval(2, 3)
    (line,) = lines([count])
    assert line.startswith(
        "tuned: above the base on 2 of 4 benchmarks (1 tied); share of wins 0.67"
    )


def test_wins_of_ties_alone() -> None:
    same = [[1.0], [0.0]]
    found = results([answered(BASE, same), answered(TUNED, same)], base="base", seed=0)
    (count,) = wins(found)
    assert (count.wins, count.ties, count.share) == (0, 1, None)
    assert [row for *_, row in rows(found, [count]) if row["benchmark"] == "all"] == []


def test_without_a_base_nothing_is_compared() -> None:
    found = results([answered(TUNED, [[1.0], [0.0]])], base="base", seed=0)
    assert found[0].comparison is None
    assert wins(found) == []


def test_a_single_prompt_has_a_difference_and_no_interval() -> None:
    found = results([answered(BASE, [[0.0]]), answered(TUNED, [[1.0]])], base="base", seed=0)
    compared = by_metric(found, "tuned")["pass"].comparison
    assert compared is not None
    assert (compared.difference.value, compared.p, compared.p_corrected) == (1.0, None, None)
    assert math.isnan(compared.difference.low)


def test_models_judged_on_different_prompts_are_not_compared() -> None:
    # a scorer that abstains on one prompt of the one and on the other of the other
    found = results(
        [answered(BASE, [[1.0], [None]]), answered(TUNED, [[None], [1.0]])], base="base", seed=0
    )
    assert [(r.estimate.n, r.comparison) for r in found] == [(1, None), (1, None)]
    assert wins(found) == []


def test_rows_have_the_columns_of_their_table() -> None:
    found = results(
        [
            answered(BASE, [[0.0, 1.0]] * 3, mode="sampled", ks=(1, 2)),
            answered(TUNED, [[1.0, 1.0]] * 3, mode="sampled", ks=(1, 2)),
        ],
        base="base",
        seed=0,
    )
    made = list(rows(found, wins(found)))
    assert all(row.keys() == set(TABLES["evals"]) for *_, row in made)
    assert [(rollout, step) for rollout, step, _ in made] == [(0, 0)] * 2 + [(7, 9)] * 3
    last = made[-1][2]
    assert (last["benchmark"], last["metric"], last["value"], last["n"]) == (
        "all", "wins_over_base", 1.0, 1
    )  # fmt: skip
    tuned = made[2][2]
    assert (tuned["model"], tuned["metric"], tuned["k"], tuned["num_samples"]) == (
        "tuned", "pass@1", 1, 2
    )  # fmt: skip
    assert tuned["difference"] == pytest.approx(0.5)
    said = summary(found, wins(found))
    assert said["benchmarks"]["sums"]["pass@2"]["tuned"]["comparison"]["difference"]["value"] == 0.0
    assert said["wins"]["tuned"]["wins"] == 1


def cells(*asked: Answered) -> list[list[list[str]]]:
    """[benchmark][line][column]"""
    found = tables(results(asked, base="base", seed=0), asked)
    return [
        [list(line) for line in zip(*(column.cells for column in table.columns), strict=True)]
        for table in found
    ]


def test_table_leaves_components_out() -> None:
    one = answered(BASE, [[1.0]] * 4, short=[[1.0]] * 4)
    (table,) = tables(results([one], base="base", seed=0), [one])
    assert table.title == "sums: 4 prompts of test"
    assert cells(one) == [[["pass", "base", "1.000 (0.510 to 1.000)", "", ""]]]


def test_a_task_that_abstains_on_everything_has_a_line_that_says_so() -> None:
    told = "none: 'right' abstained on all answers"
    silent, sampled = [[None]] * 3, [[None, None]] * 3
    assert cells(answered(BASE, silent), answered(TUNED, silent)) == [
        [["pass", "base", told, "", ""], ["pass", "tuned", told, "", ""]]
    ]
    assert cells(answered(BASE, sampled, mode="sampled", ks=(1, 2))) == [
        [["pass@1", "base", told, "", ""]]
    ]
    judged = answered(BASE, [[1.0]] * 3, benchmark="other")
    both = cells(answered(BASE, silent, short=[[1.0]] * 3), judged)
    assert [[line[2][:5] for line in table] for table in both] == [["none:"], ["1.000"]]


def test_a_task_that_abstains_on_some_says_on_how_many_it_did_not() -> None:
    ((line,),) = cells(answered(BASE, [[1.0], [None], [0.0]]))
    assert line[2] == "0.500 (0.095 to 0.905), 2 of 3 judged"


def test_the_table_says_what_its_p_values_stand_on() -> None:
    base, better = [[0.0]] * 20, [[1.0]] * 20
    few = [[1.0]] * 3 + [[0.0]] * 17
    captions = []
    for pairs in ([(base, few)], [(base, better)], [(base, few), (base, better)], [(base, None)]):
        asked = []
        for mode, (own, tuned) in zip(("greedy", "sampled"), pairs, strict=False):
            asked.append(answered(BASE, own, mode=mode))  # type: ignore[arg-type]
            if tuned is not None:
                asked.append(answered(TUNED, tuned, mode=mode))  # type: ignore[arg-type]
        (table,) = tables(results(asked, base="base", seed=0), asked)
        captions.append(table.caption)
    assert captions == [
        "p: paired by prompt, all patterns of signs",
        "p: paired by prompt, 9,999 random patterns of signs",
        "p: paired by prompt, 9,999 random or all patterns of signs",
        None,
    ]
