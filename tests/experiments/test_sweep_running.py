"""Skipping, failing, limits and committed rows, with a stand-in for the command."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

RATE = "model.init_args.optimizer.learning_rate"
STAND_IN = f"""#!{sys.executable}
import json, pathlib, sys, time, yaml
given = yaml.safe_load(open(sys.argv[sys.argv.index("--config", 3) + 1]))
place = given["trainer"]["logger"]["init_args"]
run = pathlib.Path(place["save_dir"], place["name"], place["version"])
with open("order.txt", "a") as order:
    order.write(f"{{place['name']}}/{{place['version']}} {{'--ckpt_path' in sys.argv}}\\n")
rollouts = given["data"]["init_args"]["num_rollouts"]
if rollouts == 13:
    print("first line")
    sys.exit("thirteen is refused")
if rollouts == 99:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "last.ckpt").touch()
    time.sleep(60)
status = {{"status": "finished", "git": {{"sha": "0123456789abcdef"}}}}
(run / "run.json").write_text(json.dumps(status))
(run / "score.txt").write_text(str(rollouts / 3))
"""
COLLECT = """
import pandas as pd

def rows(cell, run):
    score = float((run / "score.txt").read_text())
    return pd.DataFrame({"half": ["b", "a"], "score": [score, score + cell["seed"]]})
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "tropism"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def arm(rollouts: int, **more):
    overrides = {"data.init_args.num_rollouts": rollouts, **more.pop("overrides", {})}
    return {"config": "tiny.yaml", "overrides": overrides, **more}


def open_sweep(path: Path):
    return import_module("sweeping").open_sweep(path)


def run(state, stand_in: str, **options) -> tuple[list[str], list[str]]:
    """Keys that failed or wait, and all lines said.

    ``until``: minutes are over once this file exists.
    """
    lines: list[str] = []
    until, running = options.pop("until", None), import_module("sweeping.running")
    keys = import_module("sweeping.planning").to_run(state, **options.pop("choose", {}))
    runner = import_module("sweeping").Runner(
        state, options.pop("jobs", 2), lines.append, tropism=stand_in, **options
    )

    def sleep_until(seconds: float) -> None:
        time.sleep(seconds)
        if until is not None and until.exists():
            runner.minutes = 0

    with pytest.MonkeyPatch.context() as patched:
        clock = SimpleNamespace(sleep=sleep_until, monotonic=time.monotonic)
        patched.setattr(running, "time", clock)
        return runner.run(keys), lines


def started(tmp_path: Path) -> list[str]:
    path = tmp_path / "order.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.removesuffix(" False") for line in lines]


def test_failure_is_told_with_its_log_and_the_others_finish(write_sweep, stand_in, tmp_path):
    arms = {"bad": arm(13, seeds=[0]), "after": arm(2, needs="bad"), "good": arm(2)}
    path = write_sweep(arms=arms)
    state = open_sweep(path)
    failed, lines = run(state, stand_in, jobs=1)
    assert failed == ["bad/seed=0", "after/seed=0", "after/seed=1"]
    assert started(tmp_path) == ["bad/seed=0", "good/seed=0", "good/seed=1"]
    assert "exit code 1" in lines[0]
    assert lines[0].endswith("bad/seed=0.log:\n    first line\n    thirteen is refused")
    assert "after/seed=1 not run: it needs bad/seed=0" in lines[-1]
    index = import_module("sweeping").index(path)
    assert index["status"].tolist() == ["failed", "unfinished", "unfinished", *["finished"] * 2]
    assert index["arm_status"].tolist() == [*["unfinished"] * 3, *["finished"] * 2]
    assert index["commit"].tolist()[-1] == "0123456789abcdef"
    written = pd.read_csv("runs/study/index.csv")
    assert written["status"].tolist() == index["status"].tolist()
    assert written["arm"].tolist() == ["bad", "after", "after", "good", "good"]

    run(state, stand_in, jobs=1)
    assert started(tmp_path) == ["bad/seed=0"], "what failed is tried again, what finished is not"


def test_stopped_cells_go_on_and_changed_ones_are_named(write_sweep, stand_in, tmp_path):
    path = write_sweep(seeds=[0], arms={"slow": arm(99), "never": arm(2, needs="slow")})
    checkpoint = Path("runs/study/slow/seed=0/checkpoints/last.ckpt")
    state = open_sweep(path)
    failed, lines = run(state, stand_in, until=checkpoint)
    assert failed == []
    assert "minutes are over: 2 cells left" in lines[-1]
    assert started(tmp_path) == ["slow/seed=0"]
    run(state, stand_in, minutes=0)
    assert started(tmp_path) == []
    run(state, stand_in, until=Path("order.txt"))
    assert started(tmp_path) == ["slow/seed=0 True"], "resumed from its checkpoint"

    planning = import_module("sweeping.planning")
    path = write_sweep(seeds=[0], arms={"slow": arm(3), "never": arm(2, needs="slow")})
    run(open_sweep(path), stand_in)
    assert started(tmp_path) == ["slow/seed=0", "never/seed=0"], "other settings: begun again"
    path = write_sweep(seeds=[0], arms={"slow": arm(4), "never": arm(2)})
    state = open_sweep(path)
    assert state.statuses() == {"slow/seed=0": "stale", "never/seed=0": "finished"}
    assert planning.to_run(state) == []
    assert planning.why_stale(state, "slow/seed=0") == "data.num_rollouts was 3, is 4"
    run(state, stand_in, choose={"should_rerun_stale": True})
    assert started(tmp_path) == ["slow/seed=0"]
    assert set(open_sweep(path).statuses().values()) == {"finished"}


def test_accepted_stale_cells_count(write_sweep, stand_in, tmp_path):
    sweep = import_module("sweep")
    path = write_sweep(seeds=[0], arms={"a": arm(3)}, results="r.csv", collect="c.py:rows")
    (path.parent / "c.py").write_text(COLLECT)
    state = open_sweep(path)
    run(state, stand_in)
    write_sweep(seeds=[0], arms={"a": arm(4)}, results="r.csv", collect="c.py:rows")
    assert open_sweep(path).statuses() == {"a/seed=0": "stale"}
    assert sweep.main([str(path), "--accept-stale", "--dry-run"]) == 0
    assert open_sweep(path).statuses() == {"a/seed=0": "finished"}
    shutil.rmtree("runs")
    assert open_sweep(path).statuses() == {"a/seed=0": "finished"}


def test_committed_rows_stand_for_runs_that_are_gone(write_sweep, stand_in, tmp_path):
    content = {
        "seeds": [2, 10],
        "arms": {
            "b": arm(3, grid={RATE: [0.2, 0.01]}),
            "a": arm(2, overrides={"model.init_args.model.adapter": "{run:c}"}),
            "c": arm(1),
        },
        "results": "tables/r.csv",
        "collect": "c.py:rows",
    }
    path = write_sweep(**content)
    (path.parent / "c.py").write_text(COLLECT)
    state = open_sweep(path)
    run(state, stand_in)
    committed = path.parent / "tables" / "r.csv"
    text = committed.read_text()
    rows = [line.split(",") for line in text.splitlines()]
    assert rows[0] == ["arm", "learning_rate", "seed", "hash", "commit", "half", "score"]
    cells = [(arm, rate, seed) for arm, rate, seed, *_ in rows[1::2]]
    assert cells == [
        *[("a", "", "2"), ("a", "", "10")],
        *[("b", "0.01", "2"), ("b", "0.01", "10"), ("b", "0.2", "2"), ("b", "0.2", "10")],
        *[("c", "", "2"), ("c", "", "10")],
    ]
    assert [row[4:] for row in rows[1:3]] == [
        ["0123456789", "b", str(2 / 3)],
        ["0123456789", "a", str(2 / 3 + 2)],
    ]

    shutil.rmtree("runs")
    started(tmp_path)
    assert set(state.statuses().values()) == {"finished"}
    assert import_module("sweeping.planning").to_run(state) == []
    table = import_module("sweeping").results(path)
    assert len(table) == 16
    assert set(table["arm_status"]) == {"finished"}

    # A run that another cell reads is made again; its rows stay, and the file's bytes with them.
    lines = text.splitlines(keepends=True)
    committed.write_text("".join(line for line in lines if not line.startswith("a,,10,")))
    table = import_module("sweeping").results(path)
    assert table.drop_duplicates("arm").set_index("arm")["arm_status"].to_dict() == {
        "a": "unfinished",
        "b": "finished",
        "c": "finished",
    }
    run(state, stand_in)
    assert started(tmp_path) == ["c/seed=10", "a/seed=10"]
    overlay = yaml.safe_load(Path("runs/study/a/seed=10/overlay.yaml").read_text())
    assert overlay["model"]["init_args"]["model"]["adapter"] == "runs/study/c/seed=10"
    assert committed.read_text() == text

    committed.unlink()  # rows of the runs that are here are collected again
    state.collect()
    assert {line.split(",")[0] for line in committed.read_text().splitlines()[1:]} == {"a", "c"}


def test_other_columns_and_functions_are_refused(write_sweep, stand_in):
    path = write_sweep(seeds=[0], arms={"a": arm(1)}, results="r.csv", collect="c.py:rows")
    with pytest.raises(ValueError, match=r"c\.py:rows' is no FILE"):
        open_sweep(path).statuses()
    (path.parent / "c.py").write_text("seed = 1")
    with pytest.raises(ValueError, match="has no function 'rows'"):
        open_sweep(path).statuses()
    (path.parent / "c.py").write_text(COLLECT.replace('"half"', '"seed"'))
    with pytest.raises(ValueError, match=r"rename the collected columns \['seed'\]"):
        run(open_sweep(path), stand_in)
    (path.parent / "c.py").write_text(
        COLLECT.replace("return ", "return pd.DataFrame() if 1 else ")
    )
    with pytest.raises(ValueError, match="no rows were collected"):
        open_sweep(path).collect()
    (path.parent / "c.py").write_text(COLLECT)
    open_sweep(path).collect()
    write_sweep(seeds=[0, 1], arms={"a": arm(1)}, results="r.csv", collect="c.py:rows")
    (path.parent / "c.py").write_text(COLLECT.replace('"half"', '"part"'))
    with pytest.raises(ValueError, match="name another results file"):
        run(open_sweep(path), stand_in)


def test_cell_that_another_command_runs_is_left_alone(write_sweep, stand_in, tmp_path):
    fcntl = import_module("fcntl")
    path = write_sweep(seeds=[0, 1], arms={"a": arm(1)})
    state = open_sweep(path)
    log = Path("runs/study/a/seed=0.log")
    log.parent.mkdir(parents=True)
    with log.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        failed, lines = run(state, stand_in)
    assert failed == []
    assert "a/seed=0 is run by another command" in lines[0]
    assert started(tmp_path) == ["a/seed=1"]


def test_command_says_what_there_is_to_do_and_how_it_ended(write_sweep, capfd, tmp_path):
    sweep = import_module("sweep")
    path = write_sweep(arms={"aa": arm(1), "bb": arm(1)})
    assert sweep.main([str(path), "--dry-run", "--only", "bb/*1"]) == 0
    out = capfd.readouterr().out
    assert "unfinished bb/seed=1  <- to run" in out
    assert "4 cells: 4 unfinished; 1 to run." in out
    assert not Path("runs").exists()
    assert sweep.main([str(path), "--only", "cc"]) == 2
    assert "'cc' fits no cell" in capfd.readouterr().err
    assert sweep.main([str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml cannot be read" in capfd.readouterr().err


def test_one_thread_each_where_runs_go_side_by_side(write_sweep, tmp_path):
    script = tmp_path / "env"
    script.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS" >> threads.txt\nexit 1\n')
    script.chmod(0o755)
    state = open_sweep(write_sweep(seeds=[0], arms={"a": arm(1)}))
    before = os.environ.get("OMP_NUM_THREADS", "")
    for jobs in (1, 2):
        run(state, str(script), jobs=jobs)
    assert Path("threads.txt").read_text().splitlines() == [before, "1"]
    assert json.loads(Path("runs/study/a/seed=0/cell.json").read_text())["status"] == "failed"
