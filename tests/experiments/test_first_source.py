"""The first source's experiment: its table of a real run, its report of a table made by hand."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import yaml
from experiments.domains.first_source import report, tables

from tropism.measurements.records import RecordTable, read

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "domains" / "first_source"
TWO_DOMAINS = """
model:
  init_args:
    objective: {scale: none}
    reward_weights: {format: 0.2, accuracy: 1.0}
data:
  init_args:
    tasks:
      - class_path: tropism.tasks.skills.Skills
        init_args: {skills: [add, larger], name: easy}
      - class_path: tropism.tasks.skills.Skills
        init_args: {skills: [sort, reverse], name: hard}
    batch_size: 16
    num_rollouts: 4
    num_train_prompts: 16
    num_validation_prompts: 8
trainer:
  val_check_interval: 2
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 1, num_prompts: 4, probes_per_reading: 2, should_draw: false}
    - class_path: tropism_callbacks.AdaptiveRewards
      init_args:
        outcome: hard.accuracy
        policy:
          class_path: tropism.adaptation.rewards.GradientShare
          init_args: {target: 0.9, min_probes: 2}
"""
EVERY_GROUP = """
    - class_path: tropism_callbacks.RolloutSamples
      init_args: {every_n_rollouts: 1, num_samples: null}
"""


def value(table: pd.DataFrame, rollout: int, domain: str, measure: str) -> tuple[float, int]:
    """Value and n of the one row there is."""
    chosen = (table["rollout"] == rollout) & (table["domain"] == domain)
    ((found, n),) = table.loc[chosen & (table["measure"] == measure), ["value", "n"]].to_numpy()
    return float(found), int(n)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_measure_of_a_run_with_two_domains(tropism, tmp_path):
    config = write(tmp_path / "two.yaml", TWO_DOMAINS + EVERY_GROUP)
    run = tropism("--config", config)
    table = tables.rows({}, run)
    assert sorted(table["rollout"].unique()) == [0, 2, 4]
    assert set(table.loc[table["rollout"] == 0, "measure"]) == {"pass"}

    # Against the records, counted anew: in rollouts 2 and 3 two groups of four of either domain.
    completions = [row for row in RecordTable(run, "completions").rows() if row["rollout"] >= 2]
    passed: dict[str, list[float]] = {}
    advantages = {"easy": 0.0, "hard": 0.0}
    for row in completions:
        domain = row["prompt_id"].split("/")[0]
        key = f"{row['rollout']} {row['prompt_id']}"
        passed.setdefault(key, []).append(row["components"][f"{domain}.accuracy"])
        advantages[domain] += row["advantage"] ** 2
    groups = [group for key, group in passed.items() if " hard/" in key]
    assert len(groups) == 4
    mixed = sum(0 < sum(group) < 4 for group in groups) / 4
    assert value(table, 4, "hard", "mixed_share") == (mixed, 4)
    lengths = [r["num_tokens"] for r in completions if r["prompt_id"].startswith("hard/")]
    assert value(table, 4, "hard", "completion_length")[0] == pytest.approx(
        sum(lengths) / 16, abs=1e-6
    )
    assert value(table, 4, "hard", "reward/accuracy") == (
        pytest.approx(sum(map(sum, groups)) / 16, abs=1e-6), 16,
    )  # fmt: skip
    share = advantages["hard"] / sum(advantages.values())
    assert value(table, 4, "hard", "advantage_share")[0] == pytest.approx(share, abs=1e-6)

    shares = [value(table, 4, domain, "gradient_share")[0] for domain in ("easy", "hard")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    gradients = read(run, "reward_gradients")
    own = gradients[(gradients["rollout"] == 3) & (gradients["component"] == "easy.accuracy")]
    cosine = own.loc[own["other"] == "hard.accuracy", "cosine"].mean()
    assert value(table, 4, "easy", "cosine/hard") == (pytest.approx(cosine, abs=1e-6), 1)
    weights = read(run, "rewards")
    last = weights[(weights["rollout"] == 3) & (weights["component"] == "easy.format")]
    assert value(table, 4, "easy", "weight/format")[0] == pytest.approx(
        last["weight"].item(), abs=1e-6
    )
    steps = read(run, "steps")
    spent = steps.filter(regex="seconds_(rollout|reward|train|probe)").sum(axis=1)
    assert value(table, 2, "all", "seconds") == (pytest.approx(spent[:2].sum(), abs=1e-5), 2)
    decisions = read(run, "decisions")
    applied = (decisions["status"] == "applied") & (decisions["rollout"] >= 2)
    assert value(table, 4, "all", "decisions/rewards")[0] == applied.sum()


def test_groups_that_all_pass_or_all_fail_are_not_mixed():
    assert tables.mixed_share(pd.Series([0.0, 0.25, 1.0, 0.875, 0.0])) == pytest.approx(2 / 5)


def test_a_run_whose_groups_are_not_whole_is_refused(tropism, tmp_path):
    run = tropism("--config", write(tmp_path / "two.yaml", TWO_DOMAINS))
    with pytest.raises(ValueError, match="num_samples: null"):
        tables.rows({}, run)


def test_a_warm_up_has_its_evaluations_alone(tropism_sft):
    table = tables.rows({}, tropism_sft())
    assert set(table["measure"]) == {"pass", "seconds"}
    assert table["domain"].tolist() == ["skills", "skills", "all"]


def made_up(gains: dict[str, dict[str, float]], seeds: int = 3) -> pd.DataFrame:
    """Both arms from 0.2, half of the gain by the middle; 100 prompts. Code is scored only."""
    rows: list[tuple[object, ...]] = []
    for seed in range(seeds):
        for domain in ("maths", "science", "code"):
            rows += [("sft", seed, 0, domain, "pass", 0.1, 100)]
            rows += [("sft", seed, 16, domain, "pass", 0.2, 100)]
            for arm, own in gains.items():
                for t, rollout in enumerate((12, 24), start=1):
                    passes = 0.2 + own[domain] * t / 2 + 0.01 * (seed - 1)
                    rows += [(arm, seed, rollout, domain, "pass", passes, 100)]
                    if domain != "code":
                        rows += [
                            (arm, seed, rollout, domain, "mixed_share", 0.5, 24),
                            (arm, seed, rollout, domain, "gradient_share", 0.25 * t, 1),
                            (arm, seed, rollout, domain, "completion_length", 12.3, 192),
                            (arm, seed, rollout, domain, "reward/accuracy", 0.3 * t, 192),
                            (arm, seed, rollout, domain, "weight/accuracy", 1.0 / t, 1),
                        ]
                    if domain == "maths":
                        rows += [(arm, seed, rollout, domain, "cosine/science", -0.125, 1)]
                        rows += [(arm, seed, rollout, "all", "decisions/rewards", 1.0, 1)]
    columns = ["arm", "seed", "rollout", "domain", "measure", "value", "n"]
    return pd.DataFrame(rows, columns=columns)


GAINS = {
    "mixed": {"maths": 0.4, "science": 0.0, "code": 0.0},
    "loop": {"maths": 0.2, "science": 0.1, "code": 0.0},
}


def test_gains_and_their_difference():
    results = made_up(GAINS)
    found = report.gain(results, "mixed", "maths")
    assert found.value == pytest.approx(0.4)
    # 3 seeds x 100 prompts at 0.2 and 0.6: a deviation of 0.037 of the difference, and the seeds'
    assert 0.3 < found.low < 0.36
    assert 0.44 < found.high < 0.5
    assert found.n == 3
    assert report.difference(results, "maths").value == pytest.approx(-0.2)
    assert report.difference(results, "science").value == pytest.approx(0.1)


def test_a_seed_that_one_arm_lacks_counts_for_no_difference():
    results = made_up(GAINS)
    results = results[~((results["arm"] == "loop") & (results["seed"] > 0))]
    assert report.difference(results, "maths").n == 1
    assert report.gain(results, "mixed", "maths").n == 3


def test_lagging_is_the_least_gain_of_what_was_left():
    text = report.lagging(made_up(GAINS), "mixed")
    # 0.4 of the 0.8 that were left; code is not trained on
    assert text.startswith("Lagging: **science**.")
    assert text.endswith("science +0%, maths +50%.")


def test_page_of_all_arms_and_of_those_that_ran():
    page = report.report(made_up(GAINS))
    assert "| maths | 0.100 (" in page
    assert "| maths | +0.400 (" in page
    assert "| maths | 0-11 | 0.50 (" in page
    assert "|  | 0.250 | 12.3 | science -0.12 |" in page
    assert "| maths | accuracy | 0.30 | 0.60 | 1.00 | 0.50 |" in page
    assert "Decisions applied in 3 runs: rewards 6." in page
    alone = made_up({"mixed": GAINS["mixed"]})
    assert "Seeds: sft 3, mixed 3, loop 0." in report.report(alone)


def test_sweep_starts_both_arms_from_the_warm_up_of_their_seed():
    sweeping = import_module("sweeping.specification")
    cells = import_module("sweeping.cells").cells_of(sweeping.load(FOLDER / "sweep.yaml"))
    for arm in report.ARMS:
        assert cells[f"{arm}/seed=1"].refers == {"run:sft": "sft/seed=1"}


def test_the_loop_differs_from_the_mixed_run_by_its_two_callbacks_alone():
    mixed, loop = (
        yaml.safe_load((FOLDER / f"{arm}.yaml").read_text(encoding="utf-8")) for arm in report.ARMS
    )
    own = loop["trainer"]["callbacks+"]
    loop["trainer"]["callbacks+"] = own[: len(mixed["trainer"]["callbacks+"])]
    added = [
        entry["class_path"].split(".")[1] for entry in own[len(mixed["trainer"]["callbacks+"]) :]
    ]
    loop["trainer"]["logger"] = mixed["trainer"]["logger"]
    assert loop == mixed
    assert added == ["AdaptiveLoRA", "AdaptiveRewards"]
    warm_up = yaml.safe_load((FOLDER / "sft.yaml").read_text(encoding="utf-8"))
    for name in ("tasks", "num_validation_prompts", "out_of_domain_tasks"):
        assert warm_up["data"]["init_args"][name] == mixed["data"]["init_args"][name]
