"""KLDrift in real runs of the organism: rows, cadence, resume, and nothing else moved."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.loop.drift import gold_answers, measure_drift
from tropism.measurements.kl_drift import TokenKL
from tropism.measurements.records import read
from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.skills import Skills
from tropism_callbacks import KLDrift
from tropism_callbacks.kl_drift import mean_over_tokens

Tropism = Callable[..., Path]
TASKS = [
    "--data.init_args.tasks",
    '[{"class_path": "tropism.tasks.skills.Skills", "init_args": {"skills": ["add", "sort"]}}]',
    "--data.init_args.out_of_domain_tasks",
    '[{"class_path": "tropism.tasks.skills.Skills", '
    '"init_args": {"skills": ["record", "bracket"], "name": "other"}}]',
    "--data.init_args.num_out_of_domain_prompts=6",
]


def callback(name: str, **settings: Any) -> list[str]:
    value = {"class_path": f"tropism_callbacks.{name}", "init_args": settings}
    return ["--trainer.callbacks+", json.dumps(value)]


def drift(**settings: Any) -> list[str]:
    return callback("KLDrift", **{"every_n_rollouts": 2, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_rollouts": 0}, "every_n_rollouts=0: give at least 1"),
        ({"num_prompts": 1}, "num_prompts=1: give at least 2"),
        ({"source": "base"}, "source='base': choose from"),
        ({"scope": "prompt"}, "scope='prompt': choose from"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLDrift(**settings)


def test_mean_over_tokens_by_hand() -> None:
    # Prompt 0 has 1, 3; prompt 1 has 8 and a dropped one: tokens count, not prompts.
    values = torch.tensor([1.0, 3.0, 8.0, math.nan])
    tokens = TokenKL(values, torch.full((4,), math.inf), torch.tensor([0, 0, 1, 1]))
    row = mean_over_tokens(tokens, "forward")
    assert row["kl"] == 4.0
    assert (row["num_prompts"], row["num_tokens"], row["num_dropped"]) == (2, 3, 1)
    assert (row["ci_low"], row["ci_high"]) == (2.0, 8.0)  # prompt 0 twice, prompt 1 twice
    assert mean_over_tokens(tokens, "reverse") == {
        "kl": None, "ci_low": None, "ci_high": None,
        "num_prompts": 0, "num_tokens": 0, "num_dropped": 4,
    }  # fmt: skip


def test_rows_are_numbered_as_those_of_evaluation(tropism: Tropism) -> None:
    options = [*TASKS, "--trainer.val_check_interval=2"]
    alone = tropism(*options)
    run = tropism(*options, *drift())
    rows, evals = read(run, "kl_drift"), read(run, "evals")
    keys = ["rollout", "step", "task", "domain"]
    forward = rows[rows["direction"] == "forward"][keys].to_numpy().tolist()
    assert forward == evals[["rollout", "step", "benchmark", "domain"]].to_numpy().tolist()
    assert rows["direction"].tolist() == ["forward", "reverse"] * 6
    assert set(rows["source"]) == {"gold"}
    assert set(rows["scope"]) == {"completion"}
    assert rows[rows["task"] == "other"]["num_prompts"].tolist() == [6] * 6
    assert set(rows["num_dropped"]) == {0}
    assert (rows[rows["rollout"] == 0][["kl", "ci_low", "ci_high"]] == 0.0).all(axis=None)
    later = rows[rows["rollout"] > 0]
    assert (later["kl"] > 0).all()
    assert (later["ci_low"] < later["kl"]).all()
    assert (later["kl"] < later["ci_high"]).all()
    for table in ("completions", "evals", "update_norms"):
        assert read(run, table).equals(read(alone, table)), table

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = EventAccumulator(str(run)).Reload().Scalars("drift/other/reverse_kl")
    assert [point.step for point in points] == [0, 2, 4]
    reverse = rows[(rows["task"] == "other") & (rows["direction"] == "reverse")]
    assert [point.value for point in points] == pytest.approx(reverse["kl"].tolist())


def test_last_row_is_of_the_exported_adapter(tropism: Tropism) -> None:
    run = tropism(*drift(every_n_rollouts=3, num_prompts=5, scope="all"))
    rows = read(run, "kl_drift")
    assert rows["rollout"].tolist() == [0, 0, 3, 3, 4, 4]
    assert set(rows["num_prompts"]) == {5}
    policy = load_policy(
        Model(name="organism", dtype="float32", adapter=str(run)), LoRA(rank=4, alpha=8)
    )
    rollouts = gold_answers(policy, Skills(), Skills().prompts("validation", 8, 0)[:5])
    policy._starting_adapters = {}  # as for the run, which started from the base
    tokens = measure_drift(policy, rollouts, scope="all", max_tokens=2048)
    found = rows[rows["rollout"] == 4]
    assert found["kl"].tolist() == pytest.approx(
        [float(tokens.forward.mean()), float(tokens.reverse.mean())], abs=1e-6
    )
    assert set(found["num_tokens"]) == {len(tokens.forward)}


@pytest.mark.parametrize(("source", "drawn"), [("reference", [-1]), ("policy", [0, 2])])
def test_sampled_answers(
    tropism: Tropism, monkeypatch: pytest.MonkeyPatch, source: str, drawn: list[int]
) -> None:
    generate = TransformersEngine.generate
    calls: list[int] = []

    def spy(self: Any, prompts: Any, **options: Any) -> Any:
        if options["group_size"] == 1 and not options.get("greedy"):
            calls.append(options["rollout"])
        return generate(self, prompts, **options)

    monkeypatch.setattr(TransformersEngine, "generate", spy)
    rows = read(tropism(*drift(source=source), "--data.init_args.num_rollouts=2"), "kl_drift")
    assert calls == drawn
    assert (rows["kl"].iloc[:2] == 0).all()
    assert (rows["kl"].iloc[2:] > 0).all()


@pytest.mark.parametrize("source", ["reference", "policy"])
def test_a_resumed_run_records_what_the_whole_run_records(tropism: Tropism, source: str) -> None:
    options = [*drift(source=source, every_n_rollouts=3)]
    options += callback("Checkpoint", every_n_rollouts=2, keep=10)
    run = tropism(*options)
    whole = read(run, "kl_drift")
    tropism(*options, "--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    assert whole["rollout"].tolist() == [0, 0, 3, 3, 4, 4]
    assert read(run, "kl_drift").equals(whole)


def test_a_longer_run_has_no_row_of_the_shorter_ones_end(tropism: Tropism) -> None:
    run = tropism(*drift(), "--data.init_args.num_rollouts=1")
    assert read(run, "kl_drift")["rollout"].tolist() == [0, 0, 1, 1]
    last = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    tropism(*drift(), *last, "--data.init_args.num_rollouts=2")
    assert read(run, "kl_drift")["rollout"].tolist() == [0, 0, 2, 2]


def test_all_weights_resumed_and_without_kl_term(tropism: Tropism) -> None:
    options = ["--model.init_args.lora", "null", *drift()]
    options += ["--model.init_args.optimizer.learning_rate=1e-4"]
    options += callback("Checkpoint", every_n_rollouts=2, keep=10)
    run = tropism(*options)
    rows = read(run, "kl_drift")
    assert rows["rollout"].tolist() == [0, 0, 2, 2, 4, 4]
    assert (rows["kl"].iloc[:2] == 0).all()
    assert (rows["kl"].iloc[2:] > 0).all()
    tropism(*options, "--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    assert read(run, "kl_drift").equals(rows)


def test_measured_from_the_adapter_that_the_run_started_from(
    tropism: Tropism, tropism_sft: Tropism
) -> None:
    first = tropism_sft(*drift(), "--data.init_args.num_rollouts=2")
    second = tropism(
        "--model.init_args.model.adapter", str(first), *drift(), "--data.init_args.num_rollouts=2"
    )
    for run in (first, second):
        rows = read(run, "kl_drift")
        assert rows["rollout"].tolist() == [0, 0, 2, 2]
        assert (rows["kl"].iloc[:2] == 0).all()
        assert (rows["kl"].iloc[2:] > 0).all()


def test_what_cannot_be_measured_is_refused(tropism: Tropism, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"KLDrift .* there are none: set data\.num_validation"):
        tropism(*drift(), "--data.init_args.num_validation_prompts=0")
    run = tropism("--data.init_args.num_rollouts=1")
    middle = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    with pytest.raises(ValueError, match="holds no answer of the starting policy to 8 prompts"):
        tropism(*drift(source="reference"), *middle)
    monkeypatch.setattr(Skills, "gold", lambda self, prompt: None)
    with pytest.raises(ValueError, match=r"tasks \['skills'\] know no gold answer"):
        tropism(*drift())
