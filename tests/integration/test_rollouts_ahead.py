"""Whole runs that learn from rollouts of the policy before the last update."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tropism.grpo import GRPO
from tropism.measurements import metrics as names
from tropism.measurements.records import read
from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.collate import rows_of
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.rollouts.vllm_engine import VLLMEngine

ENGINE = "tropism.rollouts.vllm_engine.VLLMEngine"
AHEAD = ("--model.init_args.rollouts_ahead", "1",
         "--model.init_args.objective.mismatch", "token_truncate")  # fmt: skip
AT_ITS_TURN = ("--model.init_args.objective.mismatch", "token_truncate")
CHECKPOINTS = """
    - class_path: tropism_callbacks.Checkpoint
      init_args: {every_n_rollouts: 3, keep: 20}"""
LOOP = """
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 1, probes_per_reading: 2, should_align: true}
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args:
        policy:
          class_path: tropism.adaptation.placement.TopBudget
          init_args: {budget: 0.4, min_probes: 2, min_z: null, dwell: 1, hysteresis: 0.0}
    - class_path: tropism_callbacks.AdaptiveRollouts
      init_args:
        policy:
          class_path: tropism.adaptation.rollouts.CriticalGroups
          init_args: {min_probes: 2, min_groups: 1, max_groups: 4, multiple: 0.01,
                      equal_samples: true, group_sizes: [4, 8]}
"""


def with_vllm(folder) -> list[str]:
    """A tiny model with heads that vLLM takes, and a reward that it earns now and then."""
    engine = {
        "class_path": ENGINE,
        "init_args": {
            "max_sampler_gap": None,
            "engine_args": {"kv_cache_memory_bytes": 1 << 26},
        },
    }
    reward = {"class_path": "tropism.shaping.Repetition", "init_args": {"n": 1}}
    return [
        *("--model.init_args.model.name", str(folder)),
        *("--model.init_args.extra_rewards", json.dumps([reward])),
        *("--model.init_args.engine", json.dumps(engine)),
        *("--model.init_args.optimizer.learning_rate", "4e-3"),
    ]


@pytest.fixture
def seen(monkeypatch):
    """(weights before the update, batch) of every rollout that had one."""
    found = []
    tell = GRPO._tell_before_update

    def remember(self, batch):
        named = self.policy.named_trainable()
        found.append((batch, {name: value.detach().clone() for name, value in named.items()}))
        tell(self, batch)

    monkeypatch.setattr(GRPO, "_tell_before_update", remember)
    return found


def scalars(run, name: str) -> dict[int, float]:
    return {event.step: event.value for event in EventAccumulator(str(run)).Reload().Scalars(name)}


@torch.no_grad()
def logprobs(folder, weights, batch) -> list[torch.Tensor]:
    """The trainer's, with these weights, for each completion of the batch."""
    policy = load_policy(Model(name=str(folder), dtype="float32"), LoRA(rank=4, alpha=8))
    for name, value in policy.named_trainable().items():
        value.copy_(weights[name])
    found = []
    for row, completion in enumerate(batch.completions):
        part = rows_of(batch.rollouts, [row], pad_token_id=policy.pad_token_id)
        values, _ = policy.completion_logprobs(part, temperature=1.0)
        found.append(values[0, : len(completion.token_ids)])
    return found


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_rollout_is_of_the_policy_before_the_last_update(
    tropism, organism, wide_heads, seen, engine
):
    folder, chosen = (organism, []) if engine == "transformers" else (
        wide_heads, with_vllm(wide_heads))  # fmt: skip
    run = tropism(*chosen, *AHEAD, "--trainer.val_check_interval", "2")
    assert [batch.rollout for batch, _ in seen] == [0, 1, 2, 3]  # each took a step
    assert list(scalars(run, names.STALENESS).values()) == [0, 1, 1, 1]
    effective = scalars(run, names.MISMATCH_EFFECTIVE)
    gaps = read(run, "steps")["sampler_gap"]
    rounding = 1e-4
    for k, (batch, weights) in enumerate(seen):
        drawn = [completion.sampler_logprobs for completion in batch.completions]
        before = logprobs(folder, seen[max(k - 1, 0)][1], batch)
        for one, other in zip(drawn, before, strict=True):
            assert torch.allclose(one, other, atol=rounding), k
        now = logprobs(folder, weights, batch)
        keep = [i for i, advantage in enumerate(batch.advantages.tolist()) if advantage]
        change = torch.cat([now[i] - drawn[i] for i in keep])
        assert gaps[k] == pytest.approx(float(change.abs().mean()), abs=rounding)
        ratio = change.exp()
        expected = ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())
        assert effective[k] == pytest.approx(float(expected), abs=1e-4)
        assert (gaps[k] > 10 * rounding) == (k > 0)
    assert len(read(run, "evals")["rollout"].unique()) == 3  # validated between


def test_a_policy_that_stands_still_draws_the_same_ahead_or_at_its_turn(tropism):
    still = ("--model.init_args.optimizer.learning_rate", "1e-30")
    at_its_turn, ahead = tropism(*still), tropism(*still, *AHEAD)
    for table in ("completions", "rewards"):
        assert read(ahead, table).equals(read(at_its_turn, table)), table
    assert scalars(ahead, names.MISMATCH_CORRECTED) == dict.fromkeys(range(4), 0.0)


def test_without_it_the_trainer_samples_as_ever(tropism, seen, monkeypatch):
    asked = []
    generate = TransformersEngine.generate

    def remember(self, prompts, **options):
        if not options.get("greedy"):
            asked.append((options["rollout"], len(seen)))
        return generate(self, prompts, **options)

    monkeypatch.setattr(TransformersEngine, "generate", remember)
    tropism(*AT_ITS_TURN)
    assert asked == [(0, 0), (1, 1), (2, 2), (3, 3)]
    asked.clear()
    seen.clear()
    tropism(*AHEAD)
    assert asked == [(0, 0), (1, 0), (2, 1), (3, 2)]


def same(one, other, path="") -> None:
    """Equal bit for bit, whatever is nested how."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            if not str(key).startswith(("seconds", "durations", "evaluation_seconds")):
                same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}.{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other or (math.isnan(one) and math.isnan(other)), path


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_resume_across_switches_of_plan_and_sizes_is_exact(tropism, tmp_path, wide_heads, engine):
    path = tmp_path / "loop.yaml"
    path.write_text(LOOP.rstrip() + CHECKPOINTS + "\n")
    chosen = ["--config", str(path), *AHEAD, "--data.init_args.num_rollouts", "7"]
    chosen += ["--data.init_args.batch_size", "16"]
    if engine == "vllm":
        chosen += with_vllm(wide_heads)
    run = tropism(*chosen)
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    middle = torch.load(run / "checkpoints" / "rollout=000003.ckpt", weights_only=True)
    assert middle["tropism"]["ahead"]["rollout"] == 3
    assert last["tropism"]["ahead"] is None
    tables = ("steps", "rewards", "plans", "decisions", "completions")
    whole = {table: read(run, table) for table in tables}
    applied = whole["decisions"].query("status == 'applied'")
    assert {"placement", "rollouts"} <= set(applied["kind"])

    tropism(*chosen, "--ckpt_path", str(run / "checkpoints" / "rollout=000003.ckpt"))
    again = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    for part in ("state_dict", "optimizer_states", "tropism"):
        same(last[part], again[part], part)
    for table, rows in whole.items():
        columns = [column for column in rows.columns if not column.startswith("seconds_")]
        assert read(run, table)[columns].equals(rows[columns]), table


@pytest.mark.vllm
def test_an_error_on_either_side_ends_the_run_and_the_thread(tropism, wide_heads, monkeypatch):
    draw, threads = VLLMEngine._draw, set()

    def fail(self, lora_request, requests, progress):
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no engine any more")
        return draw(self, lora_request, requests, progress)

    monkeypatch.setattr(VLLMEngine, "_draw", fail)
    chosen = (*with_vllm(wide_heads), *AHEAD, "--trainer.limit_val_batches", "0")
    with pytest.raises(OSError, match="no engine any more"):
        tropism(*chosen)

    monkeypatch.setattr(VLLMEngine, "_draw", draw)

    def explode(self, batch):
        threads.update(t for t in threading.enumerate() if t.name.startswith("tropism-rollout"))
        raise ArithmeticError

    monkeypatch.setattr(GRPO, "_tell_scored", explode)
    with pytest.raises(ArithmeticError):
        tropism(*chosen, "--model.init_args.sampling.max_new_tokens", "200")
    assert len(threads) == 1
    (thread,) = threads
    thread.join(5)
    assert not thread.is_alive()
