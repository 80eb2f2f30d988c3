"""The key of an answer, and the table that keeps answers."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.evaluation.benchmarks import Job
from tropism.evaluation.samples import SampleTable, job_key
from tropism.rollouts.engine import Sampling
from tropism.tasks.rows import Rows
from tropism.tasks.skills import Skills

SCORER = "def score(prompt, completion, **columns):\n    return {value}\n"


def key(scorer: Callable[..., Any], rows: Path) -> str:
    task = Rows(path=str(rows), scorer=scorer)
    job = Job("rows", "in", "test", task, (), "greedy", 1, (1,), Sampling())
    return job_key(job, model={}, engine=None, seed=0)


def test_another_code_of_the_scorer_is_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    found = []
    for value in (0.0, 0.0, 1.0):
        (tmp_path / "judge_of_keys.py").write_text(SCORER.format(value=value))
        sys.modules.pop("judge_of_keys", None)
        importlib.invalidate_caches()
        found.append(key(importlib.import_module("judge_of_keys").score, rows))
    assert found[0] == found[1] != found[2]


def test_the_key_knows_how_it_was_asked() -> None:
    def of(**changed: int) -> str:
        sampling = Sampling(max_new_tokens=changed.get("tokens", 8))
        job = Job("a", "in", "test", Skills(), (), "sampled", 2, (1,), sampling)
        return job_key(job, model={}, engine=None, seed=changed.get("seed", 0))

    assert of() == of()
    assert len({of(), of(tokens=9), of(seed=1)}) == 3


def test_rows_of_another_layout_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "records" / "eval_samples.jsonl"
    file.parent.mkdir()
    file.write_text('{"key": "k", "prompt_sha": "s"}\n')
    with pytest.raises(ValueError, match=r"eval_samples\.jsonl has a row without .*verdicts"):
        SampleTable(tmp_path)
