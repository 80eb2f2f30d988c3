"""Which jobs a suite's settings stand for, and which settings are refused before any model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest

from tropism.evaluation.benchmarks import Benchmark, DataTask, Measures, Suite, plan
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Options, Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

SAMPLING = Sampling(max_new_tokens=32, temperature=0.9)


class Letters(Task):
    """Six prompts in test, none in validation; with options where asked."""

    components: ClassVar = ("right",)
    primary = "right"

    def __init__(self, name: str = "letters", *, has_options: bool = False) -> None:
        self.name = name
        self.has_options = has_options

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        available = 6 if split == "test" else 0
        if num > available:
            raise NotEnoughPromptsError(self.name, split, num, available, "add some")
        return [Prompt(id=f"{i}", task=self.name, text=f"letter {i}") for i in range(num)]

    def score(self, prompt: Prompt, completion: str) -> Mapping[str, float | None]:
        return {"right": float(completion == "a")}

    def options(self, prompt: Prompt) -> Options | None:
        return Options(("a", "b"), 0) if self.has_options else None


def jobs(*benchmarks: Benchmark, data: Sequence[DataTask] = (), **suite: Any) -> list[Any]:
    return plan(Suite(benchmarks=benchmarks, **suite), data, sampling=SAMPLING, seed=0)


def test_jobs_of_a_benchmark() -> None:
    (greedy, sampled, likelihood) = jobs(
        Benchmark(
            task=Letters(has_options=True), num_samples=8, k=(2, 8), temperature=0.5, num_prompts=4
        )
    )
    assert [job.mode for job in (greedy, sampled, likelihood)] == [
        "greedy", "sampled", "likelihood"
    ]  # fmt: skip
    assert {job.benchmark for job in (greedy, sampled, likelihood)} == {"letters"}
    assert [prompt.id for prompt in sampled.prompts] == ["0", "1", "2", "3"]
    assert (sampled.num_samples, sampled.ks) == (8, (1, 2, 8))  # 1, the mean, is always reported
    assert (greedy.num_samples, greedy.ks) == (1, (1,))
    assert sampled.sampling == Sampling(max_new_tokens=32, temperature=0.5)
    (own_limit,) = jobs(Benchmark(task=Letters(), max_new_tokens=5))
    assert own_limit.sampling.max_new_tokens == 5


def test_k_is_one_and_all_by_default() -> None:
    assert Measures(num_samples=6).ks == (1, 6)
    assert Measures(num_samples=1).ks == (1,)
    assert Measures().ks == ()


def test_a_split_with_fewer_prompts_is_used_whole() -> None:
    (job,) = jobs(Benchmark(task=Letters(), num_prompts=100))
    assert len(job.prompts) == 6


def test_tasks_of_data_come_first_and_know_their_domain() -> None:
    trained, other = Letters("trained"), Letters("other")
    data = [
        DataTask(task, domain, tuple(task.prompts("test", 3, 0)))
        for task, domain in ((trained, "in"), (other, "out"))
    ]
    again = Benchmark(task=trained, name="trained, more", num_prompts=6)
    found = jobs(again, Benchmark(task=Letters()), data=data)
    assert [(job.benchmark, job.domain, len(job.prompts)) for job in found] == [
        ("trained", "in", 3),
        ("other", "out", 3),
        ("trained, more", "in", 6),
        ("letters", "out", 6),
    ]
    assert [job.benchmark for job in jobs(again, data=data, data_tasks=None)] == ["trained, more"]


def test_options_are_used_where_a_task_has_them_unless_switched_off() -> None:
    with_options, without = Letters(has_options=True), Letters()
    assert [j.mode for j in jobs(Benchmark(task=with_options))] == ["greedy", "likelihood"]
    assert [j.mode for j in jobs(Benchmark(task=with_options, likelihood=False))] == ["greedy"]
    assert [j.mode for j in jobs(Benchmark(task=without))] == ["greedy"]
    with pytest.raises(ValueError, match=r"\[letters\]\.likelihood=true.*no options"):
        jobs(Benchmark(task=without, likelihood=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 4, "k": (8, 9)}, "k has 8, with PLACE.num_samples=4.*num_samples to 9"),
        ({"k": (1,)}, "k has 1, with PLACE.num_samples=0.*raise num_samples to 1"),
        ({"k": (0,), "num_samples": 4}, "k has 0: .*k of at least 1"),
        ({"k": (-2,)}, "k has -2: .*k of at least 1"),
        ({"num_samples": -1}, "num_samples=-1: give 0"),
        ({"num_samples": 2, "temperature": 0.0}, r"temperature=0\.0: .*greedy=true"),
        ({"temperature": -1.0}, r"temperature=-1\.0: samples need a value above 0"),
        ({"temperature": math.nan}, "temperature=nan: "),
        ({"max_new_tokens": 0}, "max_new_tokens=0: "),
        ({"max_new_tokens": -3}, "max_new_tokens=-3: "),
    ],
)
def test_settings_that_cannot_work_are_named_as_they_are_written(
    settings: dict[str, Any], message: str
) -> None:
    for place, make in (
        ("suite.data_tasks", Measures),
        ("suite.benchmarks[letters]", partial(Benchmark, task=Letters())),
        ("suite.benchmarks[mine]", partial(Benchmark, task=Letters(), name="mine")),
    ):
        where = re.escape(place)
        with pytest.raises(ValueError, match=rf"^{where}\.{message.replace('PLACE', where)}"):
            make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"greedy": False, "likelihood": False}, r"\[letters\]: greedy=false.*nothing is measured"),
        ({"split": "dev"}, r"suite\.benchmarks\[letters\]\.split='dev': choose from"),
        ({"num_prompts": 0}, r"suite\.benchmarks\[letters\]\.num_prompts=0"),
    ],
)
def test_other_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Benchmark(task=Letters(), **settings)


def test_suites_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="there is nothing to test"):
        jobs()
    with pytest.raises(ValueError, match="two benchmarks are called 'letters'"):
        jobs(Benchmark(task=Letters()), Benchmark(task=Letters()))
    with pytest.raises(ValueError, match="split 'validation' wanted, 0 distinct"):
        jobs(Benchmark(task=Letters(), split="validation"))
    with pytest.raises(ValueError, match=r"suite\.batch_size=0"):
        Suite(batch_size=0)
    with pytest.raises(ValueError, match=r"\[letters\]: greedy=false.*no options"):
        jobs(Benchmark(task=Letters(), greedy=False))
    nothing = DataTask(Letters(), "in", ())
    with pytest.raises(ValueError, match=r"data\.num_test_prompts"):
        jobs(data=[nothing])
