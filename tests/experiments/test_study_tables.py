"""The study's rows of a run, from records written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments.study import tables

from tropism.measurements.records import TABLES, RecordTable

CONFIG = """\
model:
  init_args:
    model: {{name: organism}}
    group_size: 8
    optimizer: {{learning_rate: 0.5}}
trainer:
  callbacks:
  - class_path: tropism_callbacks.AdaptiveLoRA
    init_args:
      policy:
        class_path: tropism.adaptation.placement.{policy}
"""


def write(folder: Path, table: str, rollout: int, **values: Any) -> None:
    row = {**dict.fromkeys(TABLES[table]), **values}
    RecordTable(folder, table).append([row], rollout=rollout, step=rollout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two rollouts that take 10 s by the clock, 5 s of the processor, a fifth of it in probes."""
    for rollout in range(2):
        write(
            tmp_path,
            "steps",
            rollout,
            seconds_rollout=4.0,
            seconds_reward=0.0,
            seconds_train=4.0,
            seconds_probe=2.0,
            seconds_processor=5.0,
            tokens=7,
            reward=float(rollout),
            trainable_params=10 + rollout,
        )
    for rollout, value in ((0, 0.5), (2, 0.75)):
        for domain in ("in", "out"):
            write(tmp_path, "evals", rollout, domain=domain, value=value, n=4)
            write(tmp_path, "kl_drift", rollout, domain=domain, direction="forward", kl=value - 0.5)
            write(tmp_path, "kl_drift", rollout, domain=domain, direction="reverse", kl=9.0)
    return tmp_path


@pytest.mark.parametrize(("policy", "seconds"), [("SignalShrink", 10.0), ("Uniform", 8.0)])
def test_an_arm_pays_for_the_probes_that_it_reads(run: Path, policy: str, seconds: float) -> None:
    (run / "config.yaml").write_text(CONFIG.format(policy=policy))
    table = tables.rows({}, run)
    assert table["seconds"].tolist() == [0.0, seconds]
    assert table["seconds_probe"].tolist() == [0.0, 2.0]


def test_rows_by_hand(run: Path) -> None:
    (run / "config.yaml").write_text(CONFIG.format(policy="Uniform"))
    first, last = tables.rows({}, run).to_dict("records")
    assert (first["held_out"], last["held_out"], last["other"]) == (0.5, 0.75, 0.75)
    assert (last["kl_in"], last["kl_out"], last["held_out_n"]) == (0.25, 0.25, 4)
    assert (last["tokens"], last["reward"]) == (14, 0.5)
    assert (last["trainable_params"], last["trainable_params_mean"]) == (11, 10.0)  # rounded to 0
    assert (last["twin"], last["learning_rate"], last["decisions_applied"]) == ("organism", 0.5, 0)
