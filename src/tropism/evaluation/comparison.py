"""From answers to results: each metric of each benchmark, with its interval and against the base.

1. a metric has one value per prompt; a prompt is the unit that everything is clustered by;
2. shares of right prompts have Wilson intervals, means of fractions a bootstrap over prompts;
3. a difference to the base is paired by prompt: bootstrap interval, sign-flip permutation test;
4. p-values are corrected (Holm) over the benchmarks that have the same metric, model by model;
5. wins over the base are counted once per benchmark, by its first metric, ties aside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tropism.evaluation.benchmarks import Job
from tropism.evaluation.contestants import Contestant
from tropism.evaluation.pass_at_k import maj_at_k, pass_at_k
from tropism.evaluation.samples import Row
from tropism.evaluation.statistics import (
    Estimate,
    holm,
    mean_interval,
    paired_permutation_test,
    wilson_interval,
)
from tropism.evaluation.suite import Answered
from tropism.measurements.metrics import PASS

NUM_RESAMPLES = 9_999
"""Sign patterns of a permutation test that has more of them: the smallest p-value is then 2e-4.
Where 13 prompts differ, or fewer, all are counted."""


@dataclass(frozen=True)
class Comparison:
    """A metric of a model against the base's, on the same prompts.

    Args:
        difference: Mean over prompts of model minus base; no interval from a single prompt.
        p: Two-sided, of the paired permutation test; None from a single prompt.
        num_patterns: Sign patterns that p was counted on; None where there is no p.
        is_exact: They are all that there are.
        p_corrected: After Holm's correction over benchmarks.
    """

    difference: Estimate
    p: float | None
    num_patterns: int | None = None
    is_exact: bool = False
    p_corrected: float | None = None


@dataclass(frozen=True)
class Result:
    """One metric of one model on one benchmark.

    Args:
        contestant: The model.
        job: What was asked.
        metric: ``pass``, ``pass@k``, ``maj@k``, ``likelihood``, ``likelihood_per_token``, or
            ``components/<name>``.
        k: Samples that the metric is about.
        values: Prompt id -> value; prompts that were not judged are left out.
        estimate: Its mean over prompts.
        comparison: None for the base, and where no base was evaluated.
    """

    contestant: Contestant
    job: Job
    metric: str
    k: int
    values: Mapping[str, float]
    estimate: Estimate
    comparison: Comparison | None = None

    @property
    def is_component(self) -> bool:
        return self.metric.startswith("components/")


@dataclass(frozen=True)
class Wins:
    """On how many benchmarks a model is above the base.

    Args:
        wins, losses, ties: Benchmarks whose first metric is above, below, or the same.
        share: Wins among those that are not tied, with its Wilson interval; None where all are.
    """

    contestant: Contestant
    wins: int
    losses: int
    ties: int
    share: Estimate | None


def results(answered: Sequence[Answered], *, base: str, seed: int) -> list[Result]:
    """All metrics, in order, compared with those of the contestant called ``base``.

    Args:
        seed: Of the resampling.
    """
    found = [result for one in answered for result in _measure(one, seed)]
    reference = {_place(r): r for r in found if r.contestant.name == base}
    compared = [
        r
        if r.contestant.name == base or _place(r) not in reference
        else replace(r, comparison=_compare(r, reference[_place(r)], seed))
        for r in found
    ]
    return _corrected(compared)


def wins(found: Sequence[Result]) -> list[Wins]:
    """The count of wins over the base, of each model that was compared with it."""
    first: dict[tuple[str, str], Result] = {}
    for result in found:
        if result.comparison is not None and not result.is_component:
            first.setdefault((result.contestant.name, result.job.benchmark), result)
    counts: dict[str, list[Result]] = defaultdict(list)
    for (name, _), result in first.items():
        counts[name].append(result)
    return [_count(own) for own in counts.values()]


def _count(own: Sequence[Result]) -> Wins:
    differences = [r.comparison.difference.value for r in own if r.comparison is not None]
    num_wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    decided = num_wins + losses
    share = wilson_interval(num_wins, decided) if decided else None
    return Wins(own[0].contestant, num_wins, losses, len(differences) - decided, share)


def _place(result: Result) -> tuple[str, str]:
    return result.job.benchmark, result.metric


def _measure(answered: Answered, seed: int) -> list[Result]:
    metrics: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in answered.rows:
        for name_and_k, value in _of_prompt(answered.job, row).items():
            metrics[name_and_k][row["prompt_id"]] = value
    return [
        Result(answered.contestant, answered.job, name, k, values, _estimate(values, seed))
        for (name, k), values in metrics.items()
    ]


def _of_prompt(job: Job, row: Row) -> dict[tuple[str, int], float]:
    """(metric, k) -> its value for one prompt, primary metrics first."""
    verdicts: Mapping[str, Sequence[float | None]] = row["verdicts"]
    if job.mode == "likelihood":
        return {(name, 1): float(values[0] or 0.0) for name, values in verdicts.items()}
    # Whoever abstains on an answer has not judged it: it is no sample.
    judged = [(i, v >= 1.0) for i, v in enumerate(verdicts[job.task.primary]) if v is not None]
    passed = [is_right for _, is_right in judged]
    if job.mode == "sampled":
        values = {}
        for k in (k for k in job.ks if k <= len(judged)):
            values[f"pass@{k}", k] = pass_at_k(len(judged), sum(passed), k)
            if k > 1 and row["answers"] is not None:
                answers = [row["answers"][i] for i, _ in judged]
                values[f"maj@{k}", k] = maj_at_k(answers, passed, k)
        return values
    values = {(PASS, 1): float(passed[0])} if passed else {}
    for name, (value,) in verdicts.items():
        if name != job.task.primary and value is not None:
            values[f"components/{name}", 1] = value
    return values


def _estimate(values: Mapping[str, float], seed: int) -> Estimate:
    numbers = list(values.values())
    if set(numbers) <= {0.0, 1.0}:
        return wilson_interval(round(sum(numbers)), len(numbers))
    return _mean(numbers, seed)


def _mean(numbers: Sequence[float], seed: int, *, lowest: float = 0.0) -> Estimate:
    """A bootstrap interval over prompts; none of a single prompt.

    Where all prompts have one value a bootstrap would be certain. As many prompts that are unlike
    the others as Wilson's interval of 0 of n allows could then have any value.
    """
    n = len(numbers)
    if n < 2:
        return Estimate(numbers[0], float("nan"), float("nan"), 1)
    if len(set(numbers)) > 1:
        return mean_interval(numbers, method="bootstrap", seed=seed)
    (value,) = set(numbers)
    unseen = wilson_interval(0, n).high
    return Estimate(value, value - unseen * (value - lowest), value + unseen * (1.0 - value), n)


def _compare(result: Result, base: Result, seed: int) -> Comparison | None:
    """None where no prompt was judged for both."""
    common = [prompt for prompt in result.values if prompt in base.values]
    if not common:
        return None
    a, b = ([values[prompt] for prompt in common] for values in (result.values, base.values))
    difference = _mean([x - y for x, y in zip(a, b, strict=True)], seed, lowest=-1.0)
    if len(common) < 2:
        return Comparison(difference, None)
    test = paired_permutation_test(a, b, clusters=common, seed=seed, num_resamples=NUM_RESAMPLES)
    return Comparison(difference, test.p_value, test.num_patterns, test.is_exact)


def _corrected(found: Sequence[Result]) -> list[Result]:
    families: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, result in enumerate(found):
        if result.comparison is not None and result.comparison.p is not None:
            families[result.contestant.name, result.metric].append(i)
    corrected: dict[int, float] = {}
    for places in families.values():
        p_values: list[Any] = [r.comparison.p for i in places if (r := found[i]).comparison]
        corrected.update(zip(places, holm(p_values), strict=True))
    return [
        replace(result, comparison=replace(result.comparison, p_corrected=corrected[i]))
        if i in corrected and result.comparison is not None
        else result
        for i, result in enumerate(found)
    ]
