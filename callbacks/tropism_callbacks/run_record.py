"""The run's own account of itself: run.json, one row per rollout, scalars, hyperparameters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from tropism.measurements import metrics as names
from tropism.measurements.component_statistics import component_statistics
from tropism.measurements.disk import explained_disk_full, require_writable
from tropism.measurements.records import TABLES
from tropism.provenance import RunFile, collect
from tropism.tasks.optional import data_sources, sandbox_modes
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.run_folder import Recorder, Summarized, run_folder
from tropism_callbacks.tensorboard import log_scalars
from tropism_callbacks.tensorboard_layout import log_layout

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning

_DATA_SIZES = ("num_rollouts", "prompts_per_rollout")


class RunRecord(Callback, StepObserver):
    """Records the run; nearly every run wants it, and first in the list of callbacks.

    Logs:
        ``reward/*``, ``objective/*``, ``rollouts/*``, ``system/*`` over rollouts, the optimizer's
        own (loss, grad_norm, lr) over optimizer steps; hyperparameters once, with final metrics;
        to TensorBoard, the layout of its page.
    Writes:
        ``run.json``; ``records/steps.jsonl``, a row per rollout; ``records/rewards.jsonl``, a row
        per rollout and component.
    Changes:
        Nothing in the model. Switches off Lightning's own logging of hyperparameters, which would
        log them a second time, without metrics.
    """

    def __init__(self) -> None:
        self._last_reward: float | None = None
        self._has_started = False
        self._processor_start = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        folder = run_folder(trainer)
        self._file = RunFile(folder)
        self._steps = Recorder(folder, "steps", enabled=trainer.is_global_zero)
        self._rewards = Recorder(folder, "rewards", enabled=trainer.is_global_zero)
        if trainer.is_global_zero:
            require_writable(folder)
            settings = _hyperparameters(trainer)
            facts = collect(seed=settings.get("seed"), model=settings.get("model"))
            self._has_started = True
            self._file.start({**facts, "hyperparameters": settings})
        trainer.enable_autolog_hparams = False
        pl_module.add_observer(self)  # type: ignore[operator]

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self._file.update(
                model_source=pl_module.policy.provenance,
                data=data_sources(pl_module.evaluated_tasks.values()),
                sandbox=sandbox_modes(pl_module.evaluated_tasks.values()),
                extra_rewards={
                    reward.name: dict(source)
                    for reward in pl_module.extra_rewards
                    if (source := reward.source())
                },
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._steps.rewind(pl_module.rollout)
        self._rewards.rewind(pl_module.rollout)
        log_layout(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._processor_start = time.process_time()

    def step_taken(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float]
    ) -> None:
        values = {name: metrics[column] for column, name in names.PER_STEP.items()}
        log_scalars(module.trainer, values, x=module.trainer.global_step)

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        trainer = module.trainer
        rollout, step = batch.rollout, trainer.global_step
        self._last_reward = metrics["reward"]
        processor = time.process_time() - self._processor_start
        values = {**metrics, **_seconds(batch), "seconds_processor": processor}
        self._steps.append(
            [{column: values[column] for column in TABLES["steps"]}], rollout=rollout, step=step
        )
        statistics = {
            component: component_statistics(scores, batch.group_size)
            for component, scores in batch.components.items()
        }
        weights = module.rewards.weights
        rows = [
            {
                "component": component,
                "weight": weights[component],
                **values,
                "gradient_share": module.gradient_shares.get(component),
            }
            for component, values in statistics.items()
        ]
        self._rewards.append(rows, rollout=rollout, step=step)
        log_scalars(
            trainer,
            {
                **{name: metrics[column] for column, name in names.PER_ROLLOUT.items()},
                **{names.reward_component(c): s["mean"] for c, s in statistics.items()},
                **{names.seconds(p): values[f"seconds_{p}"] for p in names.PHASES},
                **_throughput(metrics["tokens"] or 0.0, batch.seconds),
                **{name: value for name, value in metrics.items() if "/" in name},
            },
            x=rollout,
        )

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        summary = self._progress(trainer, pl_module)
        for part in (*trainer.callbacks, trainer.datamodule):  # type: ignore[attr-defined]
            if isinstance(part, Summarized):
                summary.update(part.summary())
        if trainer.is_global_zero:
            with explained_disk_full(run_folder(trainer)):
                self._file.finish(summary)
                _log_hyperparameters(trainer, summary)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if trainer.state.fn != "fit" or not trainer.is_global_zero or not self._has_started:
            return
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        summary = {**self._progress(trainer, pl_module), "error": repr(exception)}
        with suppress(OSError):  # of a full disk; the exception itself says so already
            self._file.finish(summary, status=status)

    def _progress(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        return {
            "rollouts": pl_module.rollout,
            "steps": trainer.global_step,
            "reward": self._last_reward,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"last_reward": self._last_reward}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last_reward = state_dict["last_reward"]


def _seconds(batch: RolloutBatch) -> dict[str, float]:
    return {f"seconds_{phase}": batch.seconds.get(phase, 0.0) for phase in names.PHASES}


def _throughput(tokens: float, seconds: Mapping[str, float]) -> dict[str, float | None]:
    sampling, overall = seconds.get("rollout", 0.0), sum(seconds.values())
    return {
        names.TOKENS_PER_SECOND: tokens / sampling if sampling else None,
        names.TOKENS_PER_SECOND_OVERALL: tokens / overall if overall else None,
    }


def _hyperparameters(trainer: Trainer) -> dict[str, Any]:
    data: Any = getattr(trainer, "datamodule", None)
    sizes = {} if data is None else {n: getattr(data, n, None) for n in _DATA_SIZES}
    return {**dict(trainer.lightning_module.hparams), **sizes}


def _log_hyperparameters(trainer: Trainer, summary: Mapping[str, Any]) -> None:
    final = {"final/reward": summary["reward"]} if summary["reward"] is not None else {}
    for task, result in summary.get("evaluation", {}).items():
        if result["tuned"] is not None:
            final[f"final/{task}/pass"] = result["tuned"]["value"]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(_hyperparameters(trainer), final, step=summary["rollouts"])
        else:
            logger.log_hyperparams(_hyperparameters(trainer))
