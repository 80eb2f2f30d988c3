"""Our metrics as users of `evaluate` meet them: loaded by path, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tropism.evaluation.hf_metrics import METRICS, path_of
from tropism.evaluation.statistics import wilson_interval
from tropism.tasks.structured import StructuredOutput


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """``evaluate.load`` of one of ours, with its caches in a temporary folder."""
    import sys

    import evaluate

    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield lambda name: evaluate.load(path_of(name), cache_dir=str(tmp_path), keep_in_memory=True)
    for name in set(sys.modules) - known:
        if name.startswith("evaluate_modules"):
            del sys.modules[name]


def test_pass_at_k(load: Callable[[str], Any]) -> None:
    metric = load("pass_at_k")
    found = metric.compute(predictions=[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0]], k=[1, 2])
    # 1 - C(3, 2) / C(4, 2) = 1/2; 1 - C(2, 2) / C(4, 2) = 5/6
    assert found == {
        "pass@1": pytest.approx((1 / 4 + 1 / 2) / 3),
        "pass@2": pytest.approx((1 / 2 + 5 / 6) / 3),
        "n": 3,
    }
    assert metric.compute(predictions=[[1], [0]]) == {"pass@1": 0.5, "n": 2}
    with pytest.raises(ValueError, match="pass@3 of 1 right among 2"):
        metric.compute(predictions=[[1, 0]], k=[3])


@pytest.mark.parametrize("tier", [1, 3])
def test_structured_pass(load: Callable[[str], Any], tier: int) -> None:
    task = StructuredOutput(tier=tier)
    prompts = task.prompts("test", 4, 0)
    references = [
        {
            "schema": json.dumps(prompt.columns["schema"]),
            "layout": json.dumps(layout) if (layout := prompt.columns.get("layout")) else "",
            "prompt": prompt.messages[-1]["content"],
        }
        for prompt in prompts
        if prompt.messages is not None
    ]
    gold = [task.gold(prompt) for prompt in prompts]
    answers = [*gold[:3], "I would rather not."]
    found = load("structured_pass").compute(predictions=answers, references=references)
    rate = wilson_interval(3, 4)
    assert found == {
        "structured_pass": 0.75, "ci_low": rate.low, "ci_high": rate.high, "n": 4
    }  # fmt: skip
    swapped = load("structured_pass").compute(predictions=gold[1:2], references=references[:1])
    assert swapped["structured_pass"] == 0.0


def test_their_files_are_where_evaluate_looks() -> None:
    for name in METRICS:
        path = Path(path_of(name))
        assert path.is_file()
        assert path.stem == path.parent.name == name
    with pytest.raises(ValueError, match="metric 'accuracy' is unknown"):
        path_of("accuracy")
