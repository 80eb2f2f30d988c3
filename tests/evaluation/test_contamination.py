"""Benchmarks and training: which are held out, and what testing says of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from tropism.data import PromptDataModule
from tropism.evaluation.benchmarks import Benchmark, Suite, plan
from tropism.evaluation.contamination import compared, hold_out, lines
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt


class Counted(Task):
    """Question i of a split; at most ``available`` in each."""

    components: ClassVar = ("right",)
    primary = "right"

    def __init__(self, name: str, wording: str = "", available: int = 99) -> None:
        self.name, self.wording, self.available = name, wording or name, available

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        if num > self.available:
            raise NotEnoughPromptsError(self.name, split, num, self.available, "count on")
        where = f"{self.name}-{split}"
        texts = [f"{self.wording.format(split=split)} {i}" for i in range(num)]
        return [Prompt(id=f"{where}-{i}", task=self.name, text=t) for i, t in enumerate(texts)]

    def score(self, prompt: Prompt, completion: str) -> Mapping[str, float | None]:
        return {"right": 0.0}


EXAM = Counted("exam", "T TRAIN", available=3)  # its test prompts 0 to 2 are t's training prompts


def data(task: Task | None = None, **settings: Any) -> PromptDataModule:
    tasks = [task or Counted("t", "t {split}")]
    sizes = {"batch_size": 4, "group_size": 2, "num_rollouts": 3, "num_train_prompts": 9}
    held_out = {"num_validation_prompts": 2, "num_test_prompts": 2}
    return PromptDataModule(tasks, **{**sizes, **held_out, **settings})


def trained_on(module: PromptDataModule) -> list[str]:
    module.setup("fit")
    return [prompt.id for prompt in module.training_prompts()]


def shared(suite: Suite, module: PromptDataModule) -> dict[str, Any]:
    jobs = plan(suite, [], sampling=Sampling(max_new_tokens=4), seed=0)
    return compared(jobs, module)


def test_a_benchmark_of_the_suite_is_held_out_whole() -> None:
    module = data()
    hold_out(Suite(benchmarks=(Benchmark(task=EXAM, name="final"),)), module)
    with pytest.warns(UserWarning, match=r"'t-train-0' with 'exam-test-0' \(benchmark final\)"):
        assert trained_on(module) == [f"t-train-{i}" for i in range(3, 9)]


def test_training_prompts_that_are_asked_on_purpose_stay() -> None:
    own = Benchmark(task=Counted("t", "t {split}"), name="learnt", split="train")
    others = Benchmark(task=EXAM, split="train")
    module = data()
    hold_out(Suite(benchmarks=(own,)), module)
    assert len(trained_on(module)) == 9
    module = data()
    hold_out(Suite(benchmarks=(others,)), module)  # of a task that is not trained on
    with pytest.warns(UserWarning, match="3 of 9"):
        assert len(trained_on(module)) == 6
    assert set(shared(Suite(benchmarks=(own, others)), data())["benchmarks"]) == {"exam"}


def test_without_decontamination_no_benchmark_is_read() -> None:
    unreadable = Suite(benchmarks=(Benchmark(task=Counted("x", available=0)),))
    module = data(decontaminate="off")
    hold_out(unreadable, module)
    assert len(trained_on(module)) == 9
    with pytest.raises(ValueError, match=r"suite.benchmarks, 'x': .*data.decontaminate=off"):
        hold_out(unreadable, data())
    assert shared(Suite(benchmarks=(Benchmark(task=EXAM),)), module) == {}
    assert compared([], None) == {}


@pytest.mark.parametrize(("mode", "fate"), [("drop", "leaves them out"), ("warn", "trains on")])
def test_testing_counts_what_each_benchmark_shares(mode: str, fate: str) -> None:
    benchmarks = (Benchmark(task=EXAM), Benchmark(task=Counted("other", "o {split}")))
    found = shared(Suite(benchmarks=benchmarks), data(decontaminate=mode))
    assert found["decontaminate"] == mode
    assert found["benchmarks"]["other"] == {"t": {"shared": 0, "of": 9, "examples": []}}
    (counts,) = found["benchmarks"]["exam"].values()
    assert (counts["shared"], counts["of"]) == (3, 9)
    assert counts["examples"][1] == {
        "trained_on": "t-train-1", "asked": "exam-test-1", "text": "t train 1"
    }  # fmt: skip
    (line,) = lines(found)
    assert "exam: 3 of 9 training prompts of 't'" in line
    assert fate in line


def test_a_model_is_tested_where_its_training_data_are_not() -> None:
    found = shared(Suite(benchmarks=(Benchmark(task=EXAM),)), data(Counted("t", available=0)))
    assert "9 prompts of split 'train' wanted" in found["unknown"]
    (line,) = lines(found)
    assert line.startswith("Training prompts were not compared with the benchmarks: t: 9 prompts")
