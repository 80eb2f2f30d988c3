"""RunRecord: rows, scalars, hyperparameters, and what it does when the disk says no."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from tropism.measurements import records
from tropism.measurements.component_statistics import component_statistics
from tropism_callbacks import Checkpoint, RunRecord

NAN = float("nan")


def test_component_statistics_by_hand() -> None:
    # group 1 keeps one score and has no deviation; group 2: std of (0, 1) = sqrt(1/2)
    scores = torch.tensor([0.5, NAN, 0.0, 1.0])
    result = component_statistics(scores, 2)
    assert result["mean"] == pytest.approx(0.5)
    assert result["group_std"] == pytest.approx(0.5**0.5)


def test_component_that_abstained_everywhere_is_undefined() -> None:
    result = component_statistics(torch.full((4,), NAN), 2)
    assert result == {"mean": None, "group_std": None}


def test_rows_of_steps_and_rewards(make_run: Callable[..., Any]) -> None:
    run = make_run(RunRecord()).fit()
    steps = records.read(run.folder, "steps")
    assert steps["rollout"].tolist() == [0, 1, 2, 3]
    assert steps["step"].tolist() == [1, 1, 2, 3]  # rollout 1 took no step
    assert steps["reward"].tolist() == [0.5, 0.5, 0.75, 0.375]
    assert steps["loss"].isna().tolist() == [False, True, False, False]
    assert steps["seconds_rollout"].tolist() == [2.0] * 4
    assert steps["seconds_processor"].between(0, 60, inclusive="neither").all()  # of this process
    rewards = records.read(run.folder, "rewards")
    assert len(rewards) == 8
    short = rewards[rewards["component"] == "short"].iloc[0]
    assert (short["weight"], short["mean"]) == (0.25, 0.375)
    assert rewards["gradient_share"].isna().all()


def test_scalars_by_rollout_and_by_step(
    make_run: Callable[..., Any], events: Callable[[Path], Any]
) -> None:
    read = events(make_run(RunRecord()).fit().folder)

    def points(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read.Scalars(name)]

    assert points("reward/total") == [(0, 0.5), (1, 0.5), (2, 0.75), (3, 0.375)]
    assert points("reward/short") == [(x, 0.375) for x in range(4)]
    assert points("objective/loss") == [(1, -0.5), (2, -0.5), (3, -0.5)]
    assert points("objective/lr") == [(x, pytest.approx(0.01)) for x in (1, 2, 3)]
    assert points("objective/entropy") == [(0, 1.5), (2, 1.5), (3, 1.5)]
    assert points("system/tokens_per_second") == [(x, 6.0) for x in range(4)]
    assert points("system/tokens_per_second_overall") == [(x, 3.0) for x in range(4)]
    assert points("clip_ratio/low_mean") == [(x, 0.125) for x in range(4)]
    assert points("reward/group_std")[0] == (0, 0.25)
    assert points("reward/batch_std")[0] == (0, 0.5)


def test_hyperparameters_are_logged_once_flat_with_final_metrics(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []
    original = TensorBoardLogger.log_hyperparams

    def spy(self: TensorBoardLogger, params: Any, metrics: Any = None, step: Any = None) -> None:
        calls.append((params, metrics))
        original(self, params, metrics, step)

    monkeypatch.setattr(TensorBoardLogger, "log_hyperparams", spy)
    run = make_run(RunRecord()).fit()
    assert len(calls) == 1
    assert calls[0][0]["objective"] == {"beta": 0.1}
    assert calls[0][1] == {"final/reward": 0.375}
    content = b"".join(path.read_bytes() for path in run.folder.glob("events.*"))
    assert b"_hparams_/session_start_info" in content
    assert b"objective/beta" in content


def test_run_file_from_start_to_summary(make_run: Callable[..., Any]) -> None:
    run = make_run(RunRecord()).fit()
    content = json.loads((run.folder / "run.json").read_text())
    assert content["status"] == "finished"
    assert content["seed"] == 7
    assert (content["sandbox"], content["extra_rewards"]) == ({}, {})
    assert content["summary"] == {"rollouts": 4, "steps": 3, "reward": 0.375}


def test_run_file_says_what_confines_and_what_judges(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(RunRecord())
    (task,) = run.module.tasks.values()
    monkeypatch.setattr(type(task), "sandbox_mode", "bubblewrap", raising=False)
    judged = SimpleNamespace(name="liked", source=lambda: {"source": "hub", "revision": "c0ffee"})
    run.module.extra_rewards = (SimpleNamespace(name="short", source=dict), judged)
    content = json.loads((run.fit().folder / "run.json").read_text())
    assert content["sandbox"] == {"arithmetic": "bubblewrap"}
    assert content["extra_rewards"] == {"liked": {"source": "hub", "revision": "c0ffee"}}


def test_a_failed_run_says_so(make_run: Callable[..., Any], stand_in: type) -> None:
    run = make_run(RunRecord(), module=stand_in(fail_at=2))
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    content = json.loads((run.folder / "run.json").read_text())
    assert content["status"] == "failed"
    assert content["summary"]["rollouts"] == 2
    assert "row 3" in content["summary"]["error"]


def test_a_resumed_run_has_the_same_rows(make_run: Callable[..., Any], stand_in: type) -> None:
    whole = make_run(RunRecord(), name="whole").fit()
    run = make_run(RunRecord(), Checkpoint(every_n_rollouts=2), module=stand_in(fail_at=3))
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    assert len(records.read(run.folder, "steps")) == 3  # one more than the checkpoint knows
    last = run.folder / "checkpoints" / "last.ckpt"
    again = make_run(RunRecord(), Checkpoint(every_n_rollouts=2)).fit(last)
    for table in ("steps", "rewards"):
        resumed, expected = (
            records.read(run.folder, table).drop(columns="seconds_processor", errors="ignore")
            for run in (again, whole)
        )
        assert resumed.equals(expected)
    content = json.loads((again.folder / "run.json").read_text())
    assert content["status"] == "finished"
    assert len(content["attempts"]) == 2


def test_state_round_trip() -> None:
    record = RunRecord()
    record._last_reward = 0.25
    other = RunRecord()
    other.load_state_dict(record.state_dict())
    assert other.state_dict() == {"last_reward": 0.25}


def test_unwritable_run_folder_is_refused_before_training(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(RunRecord())

    def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ValueError, match=r"run folder .*version_0 cannot be written to"):
        run.fit()
    assert run.module.rollout == 0


def test_full_disk_ends_the_run_with_earlier_rows_intact(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = records.RecordTable.append

    def fill_up(self: records.RecordTable, rows: Any, *, rollout: int, step: int) -> None:
        if rollout == 2 and self.table == "steps":
            with self.path.open("a") as file:
                file.write('{"schema": 1, "roll')  # what fitted
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        append(self, rows, rollout=rollout, step=step)

    monkeypatch.setattr(records.RecordTable, "append", fill_up)
    run = make_run(RunRecord())
    with pytest.raises(OSError, match=r"disk of the run folder .*version_0 is full.*--ckpt_path"):
        run.fit()
    assert records.read(run.folder, "steps")["rollout"].tolist() == [0, 1]
