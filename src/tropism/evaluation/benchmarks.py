"""What ``tropism test`` asks: benchmarks, and the ways in which each is put to a model.

A benchmark is a task on one of its splits. A job is one way of asking it (greedy, sampled, or by
the likelihood of its options), with the prompts drawn; jobs are what is measured and resumed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

Mode = Literal["greedy", "sampled", "likelihood"]
Domain = Literal["in", "out"]


@dataclass(frozen=True, kw_only=True)
class Measures:
    """How answers are drawn, and what is made of them.

    Args:
        greedy: One answer to each prompt, of the likeliest tokens.
        num_samples: Answers to each prompt drawn at ``temperature`` besides; 0 for none.
        k: Of pass@k and maj@k; null for 1 and ``num_samples``. pass@1 is the mean over samples.
        temperature: Of the samples.
        max_new_tokens: Completion limit in tokens; null for the model's ``sampling``.
        likelihood: Also take the likeliest of the options that the task lists; null: where it does.

    Raises:
        ValueError: Nothing is asked for, or values that cannot work together.
    """

    greedy: bool = True
    num_samples: int = 0
    k: tuple[int, ...] | None = None
    temperature: float = 1.0
    max_new_tokens: int | None = None
    likelihood: bool | None = None

    def __post_init__(self) -> None:
        where, num = self.setting, self.num_samples
        if num < 0:
            raise ValueError(f"{where}.num_samples={num}: give 0 (none) or more.")
        if not self.greedy and not num and self.likelihood is False:
            raise ValueError(
                f"{where}: greedy=false, num_samples=0, likelihood=false: nothing is measured."
            )
        for k in self.k or ():
            if k < 1:
                raise ValueError(f"{where}.k has {k}: pass@k and maj@k need k of at least 1.")
            if k > num:
                raise ValueError(
                    f"{where}.k has {k}, with {where}.num_samples={num}: pass@k and maj@k need as "
                    f"many samples; raise num_samples to {max(self.k or ())}, or lower k."
                )
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"{where}.temperature={self.temperature}: samples need a value above 0; for the "
                "likeliest answers set greedy=true and num_samples=0."
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(
                f"{where}.max_new_tokens={self.max_new_tokens}: give at least 1, or null for the "
                "model's."
            )

    @property
    def setting(self) -> str:
        """What these settings are called in a config, for errors."""
        return "suite.data_tasks"

    @property
    def ks(self) -> tuple[int, ...]:
        """The k to report, in order; 1 is always among them where there are samples."""
        if not self.num_samples:
            return ()
        return tuple(sorted({1, *((self.num_samples,) if self.k is None else self.k)}))


@dataclass(frozen=True, kw_only=True)
class Benchmark(Measures):
    """A task on one of its splits, by name.

    Args:
        task: Makes the prompts and judges the answers.
        name: In records and tables; null for the task's. No two benchmarks may share one.
        split: Which of the task's splits.
        num_prompts: At most so many; a split that has fewer is used whole.
    """

    task: Task
    name: str | None = None
    split: Split = "test"
    num_prompts: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in get_args(Split):
            raise ValueError(f"{self.setting}.split={self.split!r}: choose from {get_args(Split)}.")
        if self.num_prompts < 1:
            raise ValueError(f"{self.setting}.num_prompts={self.num_prompts}: give at least 1.")

    @property
    def setting(self) -> str:
        """The list in a config, with this one's name."""
        return f"suite.benchmarks[{self.name or self.task.name}]"

    def draw(self, seed: int) -> tuple[Prompt, ...]:
        """Its prompts; ``seed`` keys which they are where the split has more.

        Raises:
            ValueError: The split has none, or the task breaks the contract of ``Task.prompts``.
        """
        task, split, num = self.task, self.split, self.num_prompts
        try:
            prompts = task.prompts(split, num, seed)
        except NotEnoughPromptsError as error:
            if not error.num_available:
                raise
            prompts = task.prompts(split, error.num_available, seed)
        if not prompts:
            raise ValueError(f"task {task.name!r} has no prompts of split {split!r}.")
        if len({prompt.id for prompt in prompts}) != len(prompts):
            raise ValueError(f"task {task.name!r} gave a prompt id twice in split {split!r}.")
        return tuple(prompts)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Benchmarks times models: the settings of ``tropism test``.

    Args:
        checkpoints: What is evaluated beside ``--ckpt_path``: ``.ckpt`` files, folders of LoRA
            adapters or of whole models, or run folders (what the run exported).
        base: Whether the model that the config starts from is evaluated too, as the reference that
            all others are compared with.
        data_tasks: How the test prompts of ``data`` are asked (its tasks, then its out-of-domain
            tasks); null leaves them out.
        benchmarks: More benchmarks, whatever ``data`` has.
        batch_size: Prompts asked at a time. What is answered is kept when the suite stops.
    """

    checkpoints: tuple[str, ...] = ()
    base: bool = True
    data_tasks: Measures | None = Measures()
    benchmarks: tuple[Benchmark, ...] = ()
    batch_size: int = 64

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"suite.batch_size={self.batch_size}: give at least 1.")


@dataclass(frozen=True)
class Job:
    """One way of asking one benchmark.

    Args:
        benchmark: Its name.
        domain: ``in`` for tasks that the config trains on, ``out`` for all others.
        split: Where the prompts are from.
        task: Judges the answers.
        prompts: All of them.
        mode: How they are asked.
        num_samples: Answers per prompt.
        ks: The k to report of samples.
        sampling: Completion limit, and temperature of samples.
    """

    benchmark: str
    domain: Domain
    split: Split
    task: Task
    prompts: tuple[Prompt, ...]
    mode: Mode
    num_samples: int
    ks: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class DataTask:
    """A task of ``data``: where it stands to training, and its test prompts."""

    task: Task
    domain: Domain
    prompts: tuple[Prompt, ...]


def plan(suite: Suite, data: Sequence[DataTask], *, sampling: Sampling, seed: int) -> list[Job]:
    """All jobs of a suite, benchmark by benchmark; draws the prompts, loads no model.

    Args:
        data: The tasks of the data module.
        sampling: The model's; its limit holds where a benchmark has none of its own.
        seed: Keys the prompts of ``suite.benchmarks``.

    Raises:
        ValueError: No benchmark, two of one name, one without prompts, or one that is to be asked
            by options and lists none.
    """
    trained = {known.task.name for known in data if known.domain == "in"}
    asked: list[tuple[str, Domain, Split, Task, tuple[Prompt, ...], Measures]] = []
    if suite.data_tasks is not None:
        for own in data:
            if own.prompts:
                measures = suite.data_tasks
                asked.append((own.task.name, own.domain, "test", own.task, own.prompts, measures))
    for benchmark in suite.benchmarks:
        domain: Domain = "in" if benchmark.task.name in trained else "out"
        name = benchmark.name or benchmark.task.name
        prompts = benchmark.draw(seed)
        asked.append((name, domain, benchmark.split, benchmark.task, prompts, benchmark))
    if not asked:
        raise ValueError(
            "there is nothing to test: no test prompts in `data` (data.num_test_prompts, "
            "suite.data_tasks) and no suite.benchmarks."
        )
    count = Counter(name for name, *_ in asked)
    if twice := [name for name, times in count.items() if times > 1]:
        raise ValueError(
            f"two benchmarks are called {twice[0]!r}: give one of suite.benchmarks another `name`, "
            "or leave the tasks of `data` out with suite.data_tasks=null."
        )
    jobs = []
    for name, domain, split, task, prompts, measures in asked:
        modes = list(_modes(name, task, prompts, measures))
        if not modes:
            raise ValueError(
                f"{measures.setting}: greedy=false, num_samples=0, and {type(task).__name__} "
                f"({name!r}) lists no options to compare: nothing is measured."
            )
        limited = _limited(sampling, measures)
        jobs += [
            Job(name, domain, split, task, prompts, mode, num, ks, limited)
            for mode, num, ks in modes
        ]
    return jobs


def _modes(
    name: str, task: Task, prompts: Sequence[Prompt], measures: Measures
) -> Iterator[tuple[Mode, int, tuple[int, ...]]]:
    if measures.greedy:
        yield "greedy", 1, (1,)
    if measures.num_samples:
        yield "sampled", measures.num_samples, measures.ks
    if measures.likelihood is not False:
        has_options = all(task.options(prompt) is not None for prompt in prompts)
        if measures.likelihood and not has_options:
            raise ValueError(
                f"{measures.setting}.likelihood=true: {type(task).__name__} ({name!r}) lists no "
                "options; leave it null."
            )
        if has_options:
            yield "likelihood", 1, (1,)


def _limited(sampling: Sampling, measures: Measures) -> Sampling:
    limit = measures.max_new_tokens or sampling.max_new_tokens
    return replace(sampling, max_new_tokens=limit, temperature=measures.temperature)


def tasks_of(jobs: Sequence[Job]) -> Mapping[str, Task]:
    """Benchmark -> its task."""
    return {job.benchmark: job.task for job in jobs}
