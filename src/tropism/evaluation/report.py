"""What a suite leaves: rows of ``records/evals.jsonl``, a table, scalars, and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from tropism.evaluation.comparison import Comparison, Result, Wins
from tropism.evaluation.metrics import baseline_rates
from tropism.evaluation.statistics import Estimate
from tropism.evaluation.suite import Answered
from tropism.measurements import metrics as names
from tropism.measurements.records import TABLES

WINS = "wins_over_base"
Row = tuple[int, int, dict[str, Any]]
_NOTHING: Mapping[str, Any] = dict.fromkeys(TABLES["evals"])


def rows(found: Sequence[Result], counts: Sequence[Wins]) -> Iterator[Row]:
    """(rollout, step, row of the ``evals`` table) of each result, then of each count of wins."""
    for result in found:
        yield result.contestant.rollout, result.contestant.step, _row(result)
    for count in counts:
        if count.share is not None:
            row = {
                **_NOTHING,
                "benchmark": "all",
                **_interval_of(count.share),
                "model": count.contestant.name,
                "metric": WINS,
            }
            yield count.contestant.rollout, count.contestant.step, row


def _row(result: Result) -> dict[str, Any]:
    job, compared = result.job, result.comparison
    row = {
        **_NOTHING,
        "benchmark": job.benchmark,
        "domain": job.domain,
        "split": job.split,
        **_interval_of(result.estimate),
        "k": result.k,
        "temperature": job.sampling.temperature if job.mode == "sampled" else 0.0,
        "max_tokens": None if job.mode == "likelihood" else job.sampling.max_new_tokens,
        "model": result.contestant.name,
        "metric": result.metric,
        "num_samples": job.num_samples,
    }
    if compared is not None:
        row |= {
            "difference": compared.difference.value,
            "difference_low": compared.difference.low,
            "difference_high": compared.difference.high,
            "p": compared.p,
            "p_corrected": compared.p_corrected,
        }
    return row


def _interval_of(estimate: Estimate) -> dict[str, float]:
    columns = {"n": "n", "value": "value", "low": "ci_low", "high": "ci_high"}
    return {column: getattr(estimate, name) for name, column in columns.items()}


def scalars(found: Sequence[Result]) -> Iterator[tuple[int, dict[str, float]]]:
    """(rollout, name -> value) for loggers; a model's name ends the name of its scalar."""
    for result in found:
        metric, model = result.metric, result.contestant.name
        yield (
            result.contestant.rollout,
            {names.benchmark(result.job.benchmark, metric, model): result.estimate.value},
        )


def summary(found: Sequence[Result], counts: Sequence[Wins]) -> dict[str, Any]:
    """``{"benchmarks": {benchmark: {metric: {model: ...}}}, "wins": {model: ...}}``."""
    benchmarks: dict[str, dict[str, dict[str, Any]]] = {}
    for result in found:
        metrics = benchmarks.setdefault(result.job.benchmark, {})
        metrics.setdefault(result.metric, {})[result.contestant.name] = {
            **asdict(result.estimate),
            "comparison": None if result.comparison is None else asdict(result.comparison),
        }
    wins = {
        count.contestant.name: {
            "wins": count.wins,
            "losses": count.losses,
            "ties": count.ties,
            "share": None if count.share is None else asdict(count.share),
        }
        for count in counts
    }
    return {"benchmarks": benchmarks, "wins": wins}


def tables(found: Sequence[Result], answered: Sequence[Answered]) -> Iterator[Table]:
    """A table per benchmark, a line per metric and model; components are left to the records.

    A model none of whose answers were judged has a line that says so: a task may abstain.
    """
    benchmarks: dict[str, list[Answered]] = {}
    for one in answered:
        benchmarks.setdefault(one.job.benchmark, []).append(one)
    for name, asked in benchmarks.items():
        job = asked[0].job
        label = f"{name} (out of domain)" if job.domain == "out" else name
        shown = Table(title=f"{label}: {len(job.prompts)} prompts of {job.split}")
        for heading in ("metric", "answers of", "value (95 %)", "to base (95 %)", "p (Holm)"):
            shown.add_column(heading, overflow="fold")
        metrics: dict[str, list[Result]] = {}
        for result in found:
            if result.job.benchmark == name and not result.is_component:
                metrics.setdefault(result.metric, []).append(result)
        for metric, of_models in metrics.items():
            for result in of_models:
                cells = (_judged(result), *_compared(result.comparison))
                shown.add_row(metric, result.contestant.name, *cells)
            if metric == names.PASS:
                for baseline, rate in baseline_rates(job.task, job.prompts).items():
                    shown.add_row(metric, f"baseline {baseline}", _cell(rate), "", "")
            shown.add_section()
        shown.caption = _how_tested([result for own in metrics.values() for result in own])
        for one in asked:
            if not _is_judged(one):
                told = f"none: {job.task.primary!r} abstained on all answers"
                metric = names.PASS if one.job.mode == "greedy" else f"{names.PASS}@1"
                shown.add_row(metric, one.contestant.name, told, "", "")
        yield shown


def _how_tested(found: Sequence[Result]) -> str | None:
    """What the p-values of a table stand on; None without any."""
    tested = [r.comparison for r in found if r.comparison and r.comparison.p is not None]
    if not tested:
        return None
    sampled = {f"{c.num_patterns:,} random" for c in tested if not c.is_exact}
    patterns = [*sorted(sampled), *(["all"] if any(c.is_exact for c in tested) else [])]
    return f"p: paired by prompt, {' or '.join(patterns)} patterns of signs"


def _is_judged(one: Answered) -> bool:
    if one.job.mode == "likelihood":
        return True
    primary = one.job.task.primary
    return any(verdict is not None for row in one.rows for verdict in row["verdicts"][primary])


def _judged(result: Result) -> str:
    """A value, and on how many prompts it stands where the task abstained on some."""
    num, total = len(result.values), len(result.job.prompts)
    return _cell(result.estimate) + (f", {num} of {total} judged" if num < total else "")


def _compared(compared: Comparison | None) -> tuple[str, str]:
    if compared is None:
        return "", ""
    p = compared.p_corrected
    return _cell(compared.difference, "+.3f"), "" if p is None else _chance(p)


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _cell(estimate: Estimate, form: str = ".3f") -> str:
    interval = _interval(estimate, form)
    return f"{estimate.value:{form}}" + (f" ({interval})" if interval else "")


def _interval(estimate: Estimate, form: str = ".3f") -> str:
    if math.isnan(estimate.low):  # of a single prompt
        return ""
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


def lines(counts: Sequence[Wins]) -> Iterator[str]:
    """The count of wins in words, a line per model."""
    for count in counts:
        total = count.wins + count.losses + count.ties
        text = f"{count.contestant.name}: above the base on {count.wins} of {total} benchmarks"
        if count.ties:
            text += f" ({count.ties} tied)"
        if count.share is not None:
            text += f"; share of wins {count.share.value:.2f} ({_interval(count.share, '.2f')})"
        yield text
