"""Real runs of a sweep: one that is interrupted and goes on from its checkpoint."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tropism.measurements.records import read

NUM_ROLLOUTS = 40  # long enough that Ctrl-C comes before the end


def test_interrupted_run_is_resumed_in_its_folder(write_sweep, monkeypatch):
    sweeping, running = import_module("sweeping"), import_module("sweeping.running")
    path = write_sweep(
        seeds=[3],
        overrides={
            "data.init_args.num_rollouts": NUM_ROLLOUTS,
            "trainer.callbacks.Checkpoint.every_n_rollouts": 1,
            "trainer.callbacks.Pressure.every_n_rollouts": 3,
        },
        arms={"a": {"config": "tiny.yaml"}},
        results="evals.csv",
    )
    state = sweeping.open_sweep(path)
    folder = state.folder("a/seed=3")
    assert folder == Path("runs/study/a/seed=3")

    def ctrl_c_once_there_is_a_checkpoint(seconds: float) -> None:
        time.sleep(seconds)
        if (folder / "checkpoints" / "last.ckpt").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        clock = SimpleNamespace(sleep=ctrl_c_once_there_is_a_checkpoint, monotonic=time.monotonic)
        patched.setattr(running, "time", clock)
        with pytest.raises(KeyboardInterrupt):
            sweeping.Runner(state, 2, print).run(state.cells)
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    assert 1 <= len(read(folder, "steps")) < NUM_ROLLOUTS
    assert state.statuses() == {"a/seed=3": "unfinished"}
    seconds_before = state.record("a/seed=3")["seconds"]

    lines: list[str] = []
    assert sweeping.Runner(state, 2, lines.append).run(state.cells) == [], lines
    assert lines[0].startswith("[1/1] a/seed=3")
    record = json.loads((folder / "run.json").read_text())
    assert [attempt["status"] for attempt in record["attempts"]] == ["interrupted", "finished"]
    assert read(folder, "steps")["rollout"].tolist() == list(range(NUM_ROLLOUTS))
    assert state.record("a/seed=3")["seconds"] > seconds_before  # of both attempts
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed_everything"] == 3
    callbacks = {c["class_path"]: c.get("init_args") for c in config["trainer"]["callbacks"]}
    assert callbacks["tropism_callbacks.Checkpoint"]["every_n_rollouts"] == 1
    assert callbacks["tropism_callbacks.Pressure"]["every_n_rollouts"] == 3

    table = sweeping.results(path)
    assert table["rollout"].tolist() == [0, NUM_ROLLOUTS]
    assert table["value"].tolist() == read(folder, "evals")["value"].tolist()
    assert sweeping.index(path)["arm_status"].tolist() == ["finished"]
