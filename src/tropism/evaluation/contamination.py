"""Benchmarks and training prompts kept apart: held out when training, compared when testing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tropism.evaluation.benchmarks import Job, Suite
from tropism.tasks.base import Task
from tropism.types import Prompt

EXAMPLES = 3
Places = Mapping[str, Sequence[Prompt]]


def hold_out(suite: Suite, data: Any) -> None:
    """Have training leave out what shares text with a benchmark of the suite.

    Args:
        suite: Of the config that is trained with.
        data: Its data module, before ``setup``.

    Raises:
        ValueError: The prompts of a benchmark cannot be read.
    """
    if data.decontaminate == "off":
        return
    trained = {task.name for task in data.tasks}
    places = {}
    for benchmark in suite.benchmarks:
        if _is_of_training(benchmark.split, benchmark.task, trained):
            continue
        name = benchmark.name or benchmark.task.name
        try:
            places[f"benchmark {name}"] = benchmark.draw(data.seed)
        except ValueError as error:
            raise ValueError(
                f"suite.benchmarks, {name!r}: {error} Training prompts are compared with it; to "
                "train without, set data.decontaminate=off or leave it out of the suite."
            ) from error
    data.hold_out(places)


def compared(jobs: Sequence[Job], data: Any) -> dict[str, Any]:
    """How many training prompts of the config's ``data`` share text with each benchmark.

    Returns:
        For ``run.json``: ``decontaminate``, then either ``benchmarks``: benchmark -> task ->
        ``shared`` of ``of`` training prompts, with ``examples``; or ``unknown``: why the training
        prompts could not be had.
    """
    if data is None or data.decontaminate == "off":
        return {}
    trained = {task.name for task in data.tasks}
    asked: Places = {
        job.benchmark: job.prompts
        for job in jobs
        if not _is_of_training(job.split, job.task, trained)
    }
    try:
        data.setup("validate")
    except ValueError as error:  # a model can be tested where what it was trained on is not
        return {"decontaminate": data.decontaminate, "unknown": str(error)}
    sizes = Counter(prompt.task for prompt in data.training_prompts())
    benchmarks = {
        benchmark: {
            task: {
                "shared": len(leaks),
                "of": sizes[task],
                "examples": [
                    {"trained_on": leak.prompt_id, "asked": leak.held_out_id, "text": leak.text}
                    for leak in leaks[:EXAMPLES]
                ],
            }
            for task, leaks in by_task.items()
        }
        for benchmark, by_task in data.overlap(asked).items()
    }
    return {"decontaminate": data.decontaminate, "benchmarks": benchmarks}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What ``compared`` found in words: a line for each benchmark that shares something."""
    if "unknown" in found:
        yield f"Training prompts were not compared with the benchmarks: {found['unknown']}"
    fate = (
        "`tropism fit` leaves them out"
        if found.get("decontaminate") == "drop"
        else "`tropism fit` trains on them"
    )
    for benchmark, by_task in found.get("benchmarks", {}).items():
        for task, counts in by_task.items():
            if counts["shared"]:
                first = counts["examples"][0]
                yield (
                    f"{benchmark}: {counts['shared']} of {counts['of']} training prompts of "
                    f"{task!r} share text with it ({fate}), {first['trained_on']!r} with "
                    f"{first['asked']!r}: {first['text']!r}"
                )


def _is_of_training(split: str, task: Task, trained: Collection[str]) -> bool:
    """Asked on purpose: how well a model knows what it was trained on."""
    return split == "train" and task.name in trained
