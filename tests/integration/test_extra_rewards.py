"""Extra rewards in runs of the command: recorded, weighed, evaluated, resumed, moved, refused."""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForSequenceClassification

from tropism.measurements.records import read
from tropism.organism import weights_folder
from tropism.shaping import Repetition

EXTRA = "--model.init_args.extra_rewards"
WEIGHTS = "--model.init_args.reward_weights"
SHAPED = json.dumps(
    [
        {
            "class_path": "tropism.shaping.Length",
            "init_args": {"minimum": 3, "maximum": 6, "falloff": 4},
        },
        {"class_path": "tropism.shaping.Repetition", "init_args": {"n": 2}},
    ]
)
ALL = '{"format": 0.5, "accuracy": 1.0, "length": 0.25, "repetition": 0.125}'
EVERY_SAMPLE = (
    "--trainer.callbacks+",
    '{"class_path": "tropism_callbacks.RolloutSamples", "init_args": {"every_n_rollouts": 1, '
    '"num_samples": null}}',
)
CHECKPOINTS = (
    "--trainer.callbacks+",
    '{"class_path": "tropism_callbacks.Checkpoint", "init_args": {"every_n_rollouts": 1, '
    '"keep": 10}}',
)
TWO = ("--data.init_args.num_rollouts", "2")


def test_extra_rewards_are_recorded_weighed_and_evaluated_but_never_the_pass_rate(tropism):
    run = tropism(*TWO, EXTRA, SHAPED, WEIGHTS, ALL, *EVERY_SAMPLE)
    rewards = read(run, "rewards")
    assert list(rewards["component"][:4]) == ["format", "accuracy", "length", "repetition"]
    assert dict(zip(rewards["component"], rewards["weight"], strict=True)) == json.loads(ALL)

    samples = read(run, "completions")
    assert len(samples) == 16
    for row in samples.itertuples():
        inside = max(3 - row.num_tokens, row.num_tokens - 6, 0)
        expected = (1 + math.cos(math.pi * min(inside / 4, 1))) / 2
        if row.finish_reason == "length" or not row.text.strip():
            expected = 0.0
        assert row.components["length"] == pytest.approx(expected, abs=1e-6)
        assert 0 <= row.components["repetition"] <= 1
    lengths = [components["length"] for components in samples["components"]]
    assert len(set(lengths)) > 1
    mean = rewards[rewards["component"] == "length"]["mean"].mean()
    assert sum(lengths) / len(lengths) == pytest.approx(mean)
    steps = read(run, "steps")
    weights = json.loads(ALL)
    for rollout, group in samples.groupby("rollout"):
        total = sum(
            weights[name] * value for row in group["components"] for name, value in row.items()
        )
        reward = steps[steps["rollout"] == rollout]["reward"].item()
        assert reward == pytest.approx(total / len(group), rel=1e-5)

    events = EventAccumulator(str(run))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"eval/skills/length", "eval/skills/repetition", "eval/skills/pass"} <= tags
    accuracy = [event.value for event in events.Scalars("eval/skills/accuracy")]
    assert [event.value for event in events.Scalars("eval/skills/pass")] == accuracy


def test_a_resumed_run_equals_the_uninterrupted_one(tropism):
    options = (*TWO, EXTRA, SHAPED, WEIGHTS, ALL, *CHECKPOINTS)
    run = tropism(*options)
    last = run / "checkpoints" / "last.ckpt"
    expected = torch.load(last, weights_only=True)["state_dict"]
    rewards = read(run, "rewards")
    last.unlink()
    middle = run / "checkpoints" / "rollout=000001.ckpt"
    assert tropism(*options, "--ckpt_path", str(middle)) == run
    found = torch.load(last, weights_only=True)["state_dict"]
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert read(run, "rewards").equals(rewards)

    with pytest.raises(ValueError, match=r"resume with the tasks and extra_rewards of that run"):
        tropism(*TWO, "--ckpt_path", str(middle))


def test_a_run_resumes_only_with_rewards_that_judge_alike(tropism):
    run = tropism(*TWO, EXTRA, SHAPED, *CHECKPOINTS)
    middle = str(run / "checkpoints" / "rollout=000001.ckpt")
    other = SHAPED.replace('"falloff": 4', '"falloff": 5').replace("2}", "3}")
    message = r"length.falloff: 4 in the checkpoint, 5 here; extra_rewards.repetition.n: 2 in the"
    with pytest.raises(ValueError, match=message):
        tropism(*TWO, EXTRA, other, "--ckpt_path", middle)
    renamed = '[{"class_path": "tropism.shaping.SoftOverlong", "init_args": {"buffer": 4, '
    renamed += '"name": "length"}}, {"class_path": "tropism.shaping.Repetition"}]'
    with pytest.raises(ValueError, match=r"length.class: 'tropism.shaping.length.Length' in the"):
        tropism(*TWO, EXTRA, renamed, "--ckpt_path", middle)
    tropism(*TWO, EXTRA, other, "--ckpt_path", middle, subcommand="validate")


def test_a_checkpoint_with_extra_rewards_loads_without_its_config(tropism):
    from tropism import GRPO

    run = tropism("--data.init_args.num_rollouts", "1", EXTRA, SHAPED)
    module = GRPO.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    assert module.rollout == 1


def test_a_policy_moves_their_weights(tropism):
    config = """
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 1, probes_per_reading: 2}
    - class_path: tropism_callbacks.AdaptiveRewards
      init_args:
        policy:
          class_path: tropism.adaptation.rewards.SaturationDecay
          init_args: {threshold: 0.01, patience: 1}
"""
    Path("loop.yaml").write_text(config)
    three = ("--data.init_args.num_rollouts", "3")  # asked after rollouts 1 and 2
    run = tropism("--config", "loop.yaml", *three, EXTRA, SHAPED, WEIGHTS, ALL)
    decisions = read(run, "decisions")
    assert decisions["status"].iloc[0] == "applied"
    rewards = read(run, "rewards").set_index(["rollout", "component"])["weight"]
    assert rewards[2, "repetition"] < rewards[0, "repetition"] == 0.125
    assert rewards[2, "accuracy"] == rewards[0, "accuracy"] == 1.0  # the outcome's never moves
    gradients = read(run, "reward_gradients")
    assert {"length", "repetition"} <= set(gradients["component"])


def test_a_reward_model_trains_from_the_command_line(tropism, tmp_path):
    folder = tmp_path / "reward_model"
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(weights_folder(), num_labels=1)
    config.num_hidden_layers = 2
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights_folder() / file, folder)
    settings = {"model": str(folder), "scale": 2.0, "dtype": "float32", "name": "liked"}
    extra = json.dumps([{"class_path": "tropism.shaping.RewardModel", "init_args": settings}])
    (folder / "README.md").write_text("---\nlicense: mit\n---\nScores answers.\n")
    run = tropism(*TWO, EXTRA, extra, *EVERY_SAMPLE)
    (source,) = json.loads((run / "run.json").read_text())["extra_rewards"].values()
    file = folder / "model.safetensors"
    assert source["files"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    assert (source["source"], source["name"], source["licence"]) == ("folder", str(folder), "mit")
    liked = [components["liked"] for components in read(run, "completions")["components"]]
    assert len(liked) == 16
    assert all(0 < value < 1 for value in liked)
    assert len(set(liked)) > 4
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert not any("score" in name for name in saved["state_dict"])


def test_out_of_domain_tasks_and_sft_carry_them_too(tropism, tropism_sft):
    other = (
        '[{"class_path": "tropism.tasks.skills.Skills", "init_args": {"skills": ["record"], '
        '"name": "other"}}]'
    )
    run = tropism(*TWO, EXTRA, SHAPED, "--data.init_args.out_of_domain_tasks", other)
    events = EventAccumulator(str(run))
    events.Reload()
    assert "eval/other/repetition" in events.Tags()["scalars"]
    run = tropism_sft(*TWO, EXTRA, SHAPED)
    assert set(read(run, "rewards")["component"]) == {"format", "accuracy", "length", "repetition"}


def test_a_reward_that_raises_stops_and_names_itself_and_the_row(tropism, monkeypatch):
    def broken(self, prompt, completion):
        raise KeyError("units")

    monkeypatch.setattr(Repetition, "score", broken)
    message = r"repetition\.Repetition raised KeyError: 'units'.*prompt '.*completion"
    with pytest.raises(RuntimeError, match=message):
        tropism(EXTRA, SHAPED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((EXTRA, SHAPED, WEIGHTS, '{"format": 1, "accuracy": 1}'), r"reward_weights lacks \['ski"),
        ((WEIGHTS, ALL), r"reward_weights has \['length', 'repetition'\], which no task gives"),
        (
            (EXTRA, '[{"class_path": "tropism.shaping.Format"}]'),
            "Format is named 'format' like another component of task 'skills'",
        ),
        (
            (
                EXTRA,
                '[{"class_path": "tropism.shaping.SoftOverlong", "init_args": {"buffer": 4}}]',
                "--model.init_args.objective.overlong_buffer=4",
            ),
            "punish the same tokens twice",
        ),
        (
            (
                EXTRA,
                '[{"class_path": "tropism.shaping.SoftOverlong", "init_args": {"buffer": 40}}]',
            ),
            r"SoftOverlong.buffer=40 with sampling.max_new_tokens=12",
        ),
    ],
)
def test_settings_that_are_refused(tropism, capsys, arguments, message):
    with pytest.raises((ValueError, SystemExit)) as error:
        tropism(*arguments)
    text = capsys.readouterr().err + str(error.value)
    assert re.search(message, text), text
