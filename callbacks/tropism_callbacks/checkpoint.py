"""Checkpoints counted in rollouts, written so that a crash or a full disk never costs one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from tropism.measurements.disk import explained_disk_full
from tropism.rollouts.engine import EngineUnreachableError
from tropism_callbacks.run_folder import run_folder


class Checkpoint(Callback):
    """Saves every few rollouts and at the end; then exports the tuned adapter.

    Also when an engine elsewhere has been away for too long: no rollout is lost by that.

    Stock ModelCheckpoint counts optimizer steps, of which a rollout may take several or none.

    Logs:
        Nothing.
    Writes:
        ``checkpoints/rollout=000010.ckpt`` and ``checkpoints/last.ckpt`` (a hard link to the
        newest, or a copy where links are not possible), each complete or absent; when training
        ended well ``adapter/`` and ``adapter_compact/``, or ``model/``, replacing older ones only
        once they are complete.
    Changes:
        Its own place among the callbacks: last, so that what it saves holds the others' state of
        the same rollout.

    Args:
        every_n_rollouts: Save after every so many rollouts, counted from the run's first.
        keep: Newest checkpoints to keep. Ones beyond the rollout that was resumed from stay.
        export: Whether to export the policy at the end.
        merge: Also export the whole model with its adapter merged in, as ``model/``.
    """

    def __init__(
        self, every_n_rollouts: int = 10, keep: int = 2, export: bool = True, merge: bool = False
    ) -> None:
        if every_n_rollouts < 1:
            raise ValueError(
                f"Checkpoint.every_n_rollouts={every_n_rollouts}: give 1 or more. To save only at "
                "the end, give more than the run has rollouts."
            )
        if keep < 1:
            raise ValueError(f"Checkpoint.keep={keep}: at least one checkpoint must be kept.")
        self.every_n_rollouts = every_n_rollouts
        self.keep = keep
        self.should_export, self.should_merge = export, merge
        self._saved_rollout: int | None = None
        self._folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._folder = run_folder(trainer)
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The last rollout is saved here and not in on_train_end, where Lightning counts the epoch
        # as over: a run stopped early (max_time) could not be taken up again.
        is_last = trainer.should_stop or pl_module.rollout >= trainer.num_training_batches
        if pl_module.rollout % self.every_n_rollouts == 0 or is_last:
            self._save(trainer, pl_module.rollout)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        # Saved again with the evaluation in it, and as a place from which training can go on:
        # what was saved at the end of the last batch counts to Lightning as the end of it all.
        if trainer.state.fn == "fit" and pl_module.rollout == self._saved_rollout:
            self._save(trainer, pl_module.rollout)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.should_export and trainer.is_global_zero and self._saved_rollout is not None:
            with explained_disk_full(run_folder(trainer)):
                pl_module.policy.export(run_folder(trainer), should_merge=self.should_merge)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._folder is None or not trainer.is_global_zero:
            return
        is_whole = isinstance(exception, EngineUnreachableError) and trainer.training
        if is_whole and pl_module.rollout not in (0, self._saved_rollout):
            _forget_begun_batch(trainer)
            self._save(trainer, pl_module.rollout)
        last = self._folder / "checkpoints" / "last.ckpt"
        reason = "interrupted" if isinstance(exception, KeyboardInterrupt) else "ended by an error"
        if last.exists():
            command = resume_command(trainer, self._folder)
            message = f"Run {reason}. Resume from its last checkpoint with:\n  {command}"
        else:
            message = f"Run {reason} before its first checkpoint: nothing to resume from."
        print(message, file=sys.stderr, flush=True)

    def _save(self, trainer: Trainer, rollout: int) -> None:
        folder = run_folder(trainer) / "checkpoints"
        path = folder / f"rollout={rollout:06d}.ckpt"
        temporary = folder / f".{path.name}.tmp"
        with explained_disk_full(run_folder(trainer)):
            try:
                if trainer.is_global_zero:
                    folder.mkdir(parents=True, exist_ok=True)
                trainer.save_checkpoint(temporary, weights_only=False)
                if trainer.is_global_zero:
                    _synchronize(temporary)
                    os.replace(temporary, path)
                    _synchronize(folder)
                    _link(path, folder / "last.ckpt")
            finally:
                if trainer.is_global_zero:
                    temporary.unlink(missing_ok=True)
        self._saved_rollout = rollout
        if trainer.is_global_zero:
            self._prune(folder, rollout)

    def _prune(self, folder: Path, rollout: int) -> None:
        numbered = {
            int(path.stem.removeprefix("rollout=")): path for path in folder.glob("rollout=*.ckpt")
        }
        for number in sorted(number for number in numbered if number <= rollout)[: -self.keep]:
            numbered[number].unlink()


def _forget_begun_batch(trainer: Trainer) -> None:
    """Have Lightning count as between two batches, not as within one.

    It resets the counts of the epoch by itself, but not the totals, by which it tells later
    checkpoints apart.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.ready = counts.started = counts.completed


def resume_command(trainer: Trainer, folder: Path) -> str:
    """The command that takes the run up again from its last checkpoint, in the same folder."""
    words = ["tropism", "fit", "--config", str(folder / "config.yaml")]
    words += ["--ckpt_path", str(folder / "checkpoints" / "last.ckpt")]
    if isinstance(trainer.logger, TensorBoardLogger):  # else Lightning counts up the version
        words += [f"--trainer.logger.init_args.version={trainer.logger.version}"]
    return shlex.join(words)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(path: Path, link: Path) -> None:
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:  # FAT, some network file systems
            shutil.copyfile(path, temporary)
            _synchronize(temporary)
        os.replace(temporary, link)
    finally:
        temporary.unlink(missing_ok=True)
