"""The closed loop from end to end on the organism: records, exact resume, replay, rollback."""

import json
import math

import pytest
import torch

from tropism.adaptation.replay import main as replay
from tropism.measurements.records import read

CHECKPOINTS = """
    - class_path: tropism_callbacks.Checkpoint
      init_args: {every_n_rollouts: 3, keep: 20}"""
LOOP = """
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args:
        {every_n_rollouts: 1, probes_per_reading: 2, should_align: true, should_measure_gain: true}
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args:
        warmup_steps: 3
        policy:
          class_path: tropism.adaptation.placement.TopBudget
          init_args: {budget: 0.4, min_probes: 2, min_z: null, dwell: 1, hysteresis: 0.0}
    - class_path: tropism_callbacks.AdaptiveRewards
      init_args:
        policy:
          class_path: tropism.adaptation.rewards.GradientShare
          init_args: {target: 0.9, min_probes: 2}
"""
NUM = ("--data.init_args.num_rollouts", "9")


@pytest.fixture
def loop(tropism, tmp_path):
    """Runs the loop; further YAML may be added to its callbacks."""

    def run(*arguments: str, callbacks: str = CHECKPOINTS, config: str = LOOP):
        path = tmp_path / "loop.yaml"
        path.write_text(config.rstrip() + callbacks + "\n")
        return tropism("--config", str(path), *NUM, *arguments)

    return run


def checkpoint(run, name: str) -> dict:
    return torch.load(run / "checkpoints" / name, weights_only=True)


def same(one, other, path="") -> None:
    """Equal bit for bit, whatever is nested how."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            if not str(key).startswith(
                ("seconds", "durations", "evaluation_seconds", "train_time")
            ):
                same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}.{i}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other or (math.isnan(one) and math.isnan(other)), path


def test_resume_across_switches_is_exact_in_weights_moments_policies_and_records(loop):
    run = loop()
    last = checkpoint(run, "last.ckpt")
    tables = ("steps", "rewards", "pressure", "reward_gradients", "gains", "plans", "decisions",
              "update_norms", "completions")  # fmt: skip
    whole = {table: read(run, table) for table in tables}
    decisions = whole["decisions"]
    applied = decisions[(decisions["kind"] == "placement") & (decisions["status"] == "applied")]
    assert len(applied) >= 2
    (run / "checkpoints" / "last.ckpt").unlink()

    loop("--ckpt_path", str(run / "checkpoints" / "rollout=000003.ckpt"))
    again = checkpoint(run, "last.ckpt")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "tropism"):
        same(last[part], again[part], part)
    for name in last["callbacks"]:
        if name.split("{")[0] not in ("Progress",):
            same(last["callbacks"][name], again["callbacks"][name], name)
    for table, rows in whole.items():
        columns = [column for column in rows.columns if not column.startswith("seconds_")]
        assert read(run, table)[columns].equals(rows[columns]), table


def test_plans_rows_cover_every_linear_and_decisions_replay(loop, capsys):
    run = loop()
    plans = read(run, "plans")
    sizes = plans.groupby("rollout").size()
    assert sizes.index[0] == 0
    assert (sizes % 84 == 0).all()
    trained = plans[plans["state"] == "TRAIN"].groupby("rollout").size()
    assert trained.iloc[0] == 84
    assert trained.iloc[-1] < 84
    asked = read(run, "decisions").query("kind == 'placement'")["observation"].iloc[-1]
    assert all(site["signals"]["misalignment"] is not None for site in asked["sites"])
    assert asked["gain_z"] is not None
    assert {(s["plan"]["state"] == "TRAIN") for s in asked["sites"]} == {True, False}
    assert set(plans[plans["rollout"] == plans["rollout"].max()]["state"]) == {"TRAIN", "KEEP"}
    norms = read(run, "update_norms")
    last = norms[norms["rollout"] == 8]
    kept = last[last["state"] == "KEEP"]
    assert (kept["step_norm"] == 0).all()  # frozen bit for bit
    assert (kept["update_norm"] > 0).all()  # and still applied
    assert (last[last["state"] == "TRAIN"]["step_norm"] > 0).all()
    steps = read(run, "steps")
    assert steps["trainable_params"].iloc[-1] <= 0.4 * steps["trainable_params"].iloc[0] + 1

    capsys.readouterr()
    assert replay([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "placement" in shown
    assert "rewards" in shown

    table = run / "records" / "decisions.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    index = next(i for i, row in enumerate(rows) if row["observation"]["probes_pooled"])
    if rows[index]["kind"] == "placement":
        rows[index]["observation"]["sites"][5]["signals"]["snr"] += 1e-12
    else:
        rows[index]["observation"]["components"][0]["mean"] += 1e-12
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay([str(run)]) == 1
    assert f"rollout {rows[index]['rollout']}" in capsys.readouterr().out


def test_reward_weights_react_and_shares_are_recorded(loop):
    run = loop()
    rewards = read(run, "rewards")
    weights = rewards[rewards["component"] == "format"]["weight"]
    assert weights.iloc[0] == 1.0
    assert weights.iloc[-1] < 1.0
    assert (rewards[rewards["component"] == "accuracy"]["weight"] == 1.0).all()
    shares = rewards.dropna(subset="gradient_share").groupby("rollout")["gradient_share"].sum()
    assert shares.to_numpy() == pytest.approx(1.0)


def test_a_spike_after_a_switch_is_rolled_back(loop):
    guard = """
        guard: {class_path: tropism.adaptation.guard.Guard, init_args: {max_kl: 1.0e-9}}"""
    config = LOOP.replace("\n        warmup_steps: 3", guard)
    run = loop(config=config)
    decisions = read(run, "decisions")
    placement = decisions[decisions["kind"] == "placement"]
    assert "rolled back" in set(placement["status"])
    assert replay([str(run)]) == 0
    plans = read(run, "plans")
    taken_back = placement[placement["status"] == "rolled back"]["rollout"].iloc[0]
    after = plans[plans["rollout"] == taken_back].tail(84)
    assert (after["state"] == "TRAIN").all()  # as before the switch


def test_a_resumed_run_takes_back_a_switch_of_before_and_cools_down(loop):
    every = CHECKPOINTS.replace("every_n_rollouts: 3", "every_n_rollouts: 1")
    short = ("--data.init_args.num_rollouts", "6")
    run = loop(*short, callbacks=every)
    before = read(run, "decisions").query("kind == 'placement' and status == 'applied'")
    switch = int(before["rollout"].iloc[0])
    strict = LOOP.replace(
        "warmup_steps: 3",
        "guard: {class_path: tropism.adaptation.guard.Guard, init_args: {max_kl: 1.0e-9}}",
    )
    path = run / "checkpoints" / f"rollout={switch + 1:06d}.ckpt"
    assert checkpoint(run, path.name)["tropism"]["rollout"] == switch + 1
    loop(*short, "--ckpt_path", str(path), callbacks=every, config=strict)
    decisions = read(run, "decisions").query("kind == 'placement'")
    taken_back = decisions[decisions["status"] == "rolled back"].iloc[0]
    assert taken_back["rollout"] == switch + 1
    assert taken_back["decision"]["value"] == before["decision"].iloc[0]["value"]
    after = decisions[decisions["rollout"] > switch].query("status != 'rolled back'")
    assert [x["num_rollbacks"] for x in after["observation"]][:2] == [1, 1]
    assert list(after["status"])[:2] == ["held", "held"]
    assert "guard took a switch back: decision 2 of 2" in after["decision"].iloc[1]["reason"]
    assert replay([str(run)]) == 0


def test_a_policy_without_measurements_needs_no_pressure(tropism, tmp_path):
    path = tmp_path / "rotate.yaml"
    path.write_text("""
trainer:
  callbacks+:
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args:
        every_n_rollouts: 2
        policy: {class_path: tropism.adaptation.placement.Rotate, init_args: {num_sites: 10}}
""")
    run = tropism("--config", str(path), "--data.init_args.num_rollouts", "5")
    trained = read(run, "plans").query("state == 'TRAIN'").groupby("rollout").size()
    assert trained.tolist()[1:] == [10] * (len(trained) - 1)


def test_missing_pressure_and_full_parameter_training_are_refused(tropism, tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text("""
trainer:
  callbacks+:
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args: {policy: {class_path: tropism.adaptation.placement.SignalShrink}}
""")
    with pytest.raises(ValueError, match=r"add tropism_callbacks\.Pressure"):
        tropism("--config", str(path))
    with pytest.raises(ValueError, match="lora=null: there is no LoRA to move"):
        tropism("--config", str(path), "--model.init_args.lora", "null")


def test_sizes_follow_the_noise_scale_at_equal_samples(tropism, tmp_path):
    path = tmp_path / "sizes.yaml"
    path.write_text("""
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 1, probes_per_reading: 2}
    - class_path: tropism_callbacks.AdaptiveRollouts
      init_args:
        policy:
          class_path: tropism.adaptation.rollouts.CriticalGroups
          init_args: {min_probes: 2, min_groups: 1, max_groups: 8, equal_samples: true,
                      group_sizes: [2, 4, 8]}
""")
    sizes = ("--data.init_args.num_rollouts", "4", "--model.init_args.group_size", "2",
             "--data.init_args.batch_size", "16")  # fmt: skip
    run = tropism("--config", str(path), *sizes)
    decisions = read(run, "decisions")
    assert set(decisions["kind"]) == {"rollouts"}
    assert replay([str(run)]) == 0
    with pytest.raises(ValueError, match="max_groups=8, but a rollout has 4 prompts"):
        tropism("--config", str(path), *sizes[:-1], "8")


def test_exports_after_a_switch_are_the_trained_policy(loop):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tropism.models import LoRA, Model, load_policy
    from tropism.organism import weights_folder

    merging = CHECKPOINTS.replace("keep: 20", "keep: 2, merge: true")
    run = loop(callbacks=merging)
    saved = checkpoint(run, "last.ckpt")["state_dict"]
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    with torch.no_grad():
        for name, value in policy.named_trainable().items():
            value.copy_(saved[f"network.{name}"])
        ids = torch.arange(5, 30)[None]
        trained = policy.model(input_ids=ids).logits
        with policy.merged():
            merged = policy.model(input_ids=ids).logits
        options = {"dtype": torch.float32}
        for folder in ("adapter", "adapter_compact"):
            base = AutoModelForCausalLM.from_pretrained(weights_folder(), **options)
            stock = PeftModel.from_pretrained(base, run / folder)(input_ids=ids).logits
            assert torch.equal(trained, stock), folder
        whole = AutoModelForCausalLM.from_pretrained(run / "model", **options)
        assert torch.equal(whole(input_ids=ids).logits, merged)


def test_the_warm_up_of_the_config_is_the_one_that_runs(loop, monkeypatch):
    from tropism.lora.pace import Pace

    seen = set()
    step = Pace.after_step

    def after_step(self, plan):
        seen.add(self.warmup_steps)
        step(self, plan)

    monkeypatch.setattr(Pace, "after_step", after_step)
    loop("--data.init_args.num_rollouts", "2")
    assert seen == {3}
