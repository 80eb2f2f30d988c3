"""Checkpoint: cadence in rollouts, atomic files, export, and what a crash leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tropism.measurements import records
from tropism.rollouts.engine import EngineUnreachableError
from tropism_callbacks import Checkpoint, Evaluation


def files(run: Any) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


@pytest.mark.parametrize("settings", [{"every_n_rollouts": 0}, {"keep": 0}])
def test_bad_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"Checkpoint\.{next(iter(settings))}=0"):
        Checkpoint(**settings)


def test_counts_rollouts_keeps_the_newest_and_exports(make_run: Callable[..., Any]) -> None:
    run = make_run(Checkpoint(every_n_rollouts=1, keep=2)).fit()
    assert files(run) == ["last.ckpt", "rollout=000003.ckpt", "rollout=000004.ckpt"]
    folder = run.folder / "checkpoints"
    assert os.path.samefile(folder / "last.ckpt", folder / "rollout=000004.ckpt")
    assert (run.folder / "adapter" / "weights").read_text() == "export 1"


def test_saves_at_the_end_whatever_the_cadence(make_run: Callable[..., Any]) -> None:
    run = make_run(Checkpoint(every_n_rollouts=3, keep=5, export=False)).fit()
    assert files(run) == ["last.ckpt", "rollout=000003.ckpt", "rollout=000004.ckpt"]
    assert not (run.folder / "adapter").exists()


def test_saves_last_among_the_callbacks(make_run: Callable[..., Any]) -> None:
    checkpoint, other = Checkpoint(), L.Callback()
    run = make_run(checkpoint, other).fit()
    assert run.trainer.callbacks.index(checkpoint) > run.trainer.callbacks.index(other)


def test_an_early_stop_can_be_taken_up_again(make_run: Callable[..., Any]) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    run = make_run(Checkpoint(), Stop()).fit()
    assert files(run) == ["last.ckpt", "rollout=000001.ckpt"]
    again = make_run(Checkpoint()).fit(run.folder / "checkpoints" / "last.ckpt")
    assert again.module.rollout == 4
    assert again.trainer.global_step == 3


def test_a_finished_run_resumed_trains_no_further(make_run: Callable[..., Any]) -> None:
    run = make_run(Checkpoint()).fit()
    before = [parameter.clone() for parameter in run.module.network.parameters()]
    again = make_run(Checkpoint()).fit(run.folder / "checkpoints" / "last.ckpt")
    assert again.module.rollout == 4
    after = list(again.module.network.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_finished_run_can_be_trained_longer(
    make_run: Callable[..., Any], data: Callable[..., Any]
) -> None:
    run = make_run(Evaluation(), Checkpoint(), data=data(num_rollouts=2)).fit()
    again = make_run(Evaluation(), Checkpoint()).fit(run.folder / "checkpoints" / "last.ckpt")
    assert again.module.rollout == 4
    assert again.trainer.global_step == 3
    assert records.read(again.folder, "evals")["rollout"].tolist() == [0, 2, 4]


def test_a_finished_run_resumed_knows_its_result(make_run: Callable[..., Any]) -> None:
    evaluation = Evaluation()
    run = make_run(Evaluation(), Checkpoint()).fit()
    again = make_run(evaluation, Checkpoint()).fit(run.folder / "checkpoints" / "last.ckpt")
    assert again.module.rollout == 4
    result = evaluation.summary()["evaluation"]["arithmetic"]
    assert result["difference"] == pytest.approx(4 / 6)
    assert records.read(again.folder, "evals")["rollout"].tolist() == [0, 4]


@pytest.mark.parametrize("is_interrupt", [False, True])
def test_an_exception_prints_the_resume_command_and_exports_nothing(
    make_run: Callable[..., Any],
    stand_in: type,
    capsys: pytest.CaptureFixture[str],
    is_interrupt: bool,
) -> None:
    run = make_run(Checkpoint(every_n_rollouts=1), module=stand_in(fail_at=2))
    if is_interrupt:
        run.module.failure = KeyboardInterrupt()
    (run.folder / "adapter").mkdir(parents=True)
    (run.folder / "adapter" / "weights").write_text("a good one")
    with pytest.raises(SystemExit if is_interrupt else RuntimeError):  # Lightning exits with 1
        run.fit()
    error = capsys.readouterr().err
    assert ("Run interrupted." if is_interrupt else "Run ended by an error.") in error
    assert (
        f"tropism fit --config {run.folder}/config.yaml "
        f"--ckpt_path {run.folder}/checkpoints/last.ckpt "
        "--trainer.logger.init_args.version=version_0"
    ) in error
    assert (run.folder / "adapter" / "weights").read_text() == "a good one"


@pytest.mark.parametrize("failure", [EngineUnreachableError("away"), RuntimeError("a reward")])
def test_only_an_engine_that_is_away_is_a_reason_to_save(
    make_run: Callable[..., Any], stand_in: type, failure: RuntimeError
) -> None:
    """Every other failure may have come in the middle of an update."""
    run = make_run(Checkpoint(every_n_rollouts=9), module=stand_in(fail_at=2))
    run.module.failure = failure
    with pytest.raises(type(failure)):
        run.fit()
    if isinstance(failure, EngineUnreachableError):
        assert files(run) == ["last.ckpt", "rollout=000002.ckpt"]
    else:
        assert not (run.folder / "checkpoints").exists()


def test_an_exception_before_the_first_checkpoint(
    make_run: Callable[..., Any], stand_in: type, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(Checkpoint(), module=stand_in(fail_at=0))
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    assert "nothing to resume from" in capsys.readouterr().err


def test_a_full_disk_costs_no_earlier_checkpoint(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = L.Trainer.save_checkpoint

    def fill_up(self: L.Trainer, path: Path, **kwargs: Any) -> None:
        if "000002" in str(path):
            Path(path).write_bytes(b"half a checkpoint")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(self, path, **kwargs)

    monkeypatch.setattr(L.Trainer, "save_checkpoint", fill_up)
    run = make_run(Checkpoint(every_n_rollouts=1))
    with pytest.raises(OSError, match="is full"):
        run.fit()
    assert files(run) == ["last.ckpt", "rollout=000001.ckpt"]
    checkpoint = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["rollout"] == 1


def test_a_full_disk_at_the_export_is_explained(make_run: Callable[..., Any]) -> None:
    run = make_run(Checkpoint())

    def fail(folder: Path, *, should_merge: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run.module.policy.export = fail
    with pytest.raises(OSError, match="is full"):
        run.fit()
    assert files(run) == ["last.ckpt", "rollout=000004.ckpt"]


def test_last_is_a_copy_where_links_are_impossible(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = make_run(Checkpoint()).fit().folder / "checkpoints"
    assert (folder / "last.ckpt").read_bytes() == (folder / "rollout=000004.ckpt").read_bytes()


def test_checkpoints_beyond_the_resumed_rollout_stay(make_run: Callable[..., Any]) -> None:
    first = make_run(Checkpoint(every_n_rollouts=1, keep=9)).fit()
    folder = first.folder / "checkpoints"
    Checkpoint(keep=1)._prune(folder, 2)
    assert files(first) == [
        "last.ckpt",
        "rollout=000002.ckpt",
        "rollout=000003.ckpt",
        "rollout=000004.ckpt",
    ]
