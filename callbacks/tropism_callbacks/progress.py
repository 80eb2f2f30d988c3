"""A progress bar that moves while completions are sampled, where most of the time goes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console

from tropism.measurements import metrics as names
from tropism.scoring import component_names
from tropism.types import GenerationProgress, RolloutBatch, StepObserver
from tropism_callbacks.progress_display import ProgressDisplay, clock, eta_seconds

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning


class Progress(ProgressBar, StepObserver):
    """Shows rollout, phase, reward (last and moving mean), sampled tokens per second and ETA.

    On a terminal one line that is redrawn; elsewhere one plain line per rollout and evaluation.
    Takes the place of Lightning's own bar.

    Logs:
        Nothing.
    Writes:
        Standard output.
    Changes:
        Nothing.

    Args:
        window: Rollouts that the moving mean of the reward and the ETA look back on.
    """

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"Progress.window={window}: give at least 1 rollout.")
        self._rewards: deque[float] = deque(maxlen=window)
        self._durations: deque[float] = deque(maxlen=window)
        self._evaluation_seconds = 0.0
        self._display = ProgressDisplay(Console())
        self._started = 0.0  # of the rollout or evaluation that is under way
        self._rate: float | None = None
        self._last = ""
        self._batches_evaluated = 0
        self._verdicts: list[float] = []

    def enable(self) -> None:
        self._display.enabled = True

    def disable(self) -> None:
        self._display.stop()
        self._display.enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._display.console.print(*args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._display = ProgressDisplay(Console(), enabled=self._display.enabled)
        super().setup(trainer, pl_module, stage)
        pl_module.add_observer(self)  # type: ignore[operator]

    # -- training ------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self._started = time.perf_counter()
        self._show(pl_module, "generating", fraction=0.0)

    def generation_progress(self, module: FineTuning, progress: GenerationProgress) -> None:
        share = progress.done / progress.total
        if not module.trainer.training:
            self._show_evaluation(module.trainer, share)
            return
        if math.isinf(module.trainer.num_training_batches):  # before the first rollout
            info = f"{progress.done} of {progress.total} completions"
            self._display.update("sampling traces", info, completed=share, total=1)
            return
        elapsed = time.perf_counter() - self._started
        self._rate = progress.tokens / elapsed if elapsed > 0 else None
        generating = f"generating {progress.done}/{progress.total} completions"
        self._show(module, "scoring" if share == 1 else generating, fraction=share)

    def rollout_scored(self, module: FineTuning, batch: RolloutBatch) -> None:
        self._show(module, "training", fraction=1.0)

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        self._rewards.append(float(batch.rewards.mean()))
        seconds = batch.seconds.get("rollout", 0.0)
        self._rate = (metrics["tokens"] or 0.0) / seconds if seconds > 0 else self._rate
        self._rate = metrics.get(names.TOKENS_PER_SECOND) or self._rate  # of one sampled ahead
        passed, kl = pass_share(module, batch), metrics["kl"]
        self._last = " ".join(
            [f"reward {self._rewards[-1]:.2f}"]
            + ([] if passed is None else [f"pass {passed:.2f}"])
            + ([] if kl is None else [f"kl {kl:.3f}"])
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self._durations.append(time.perf_counter() - self._started)
        done, total = pl_module.rollout, int(trainer.num_training_batches)
        left = self._evaluation_seconds + (
            eta_seconds(self._durations, remaining=total - done) or 0
        )
        rate = "" if self._rate is None else f" {self._rate:.0f} tok/s"
        self._display.line(f"rollout {done}/{total} {self._last}{rate} eta {clock(left)}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._display.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._display.stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._display.stop()

    def state_dict(self) -> dict[str, Any]:
        return {
            "rewards": list(self._rewards),
            "durations": list(self._durations),
            "evaluation_seconds": self._evaluation_seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rewards.extend(state_dict["rewards"])
        self._durations.extend(state_dict["durations"])
        self._evaluation_seconds = state_dict["evaluation_seconds"]

    def _show(self, module: FineTuning, phase: str, *, fraction: float) -> None:
        done, total = module.rollout, int(module.trainer.num_training_batches)
        left = eta_seconds(
            self._durations,
            remaining=total - done,
            elapsed=time.perf_counter() - self._started,
            fraction=fraction,
        )
        parts = [phase]
        if self._rewards:
            mean = sum(self._rewards) / len(self._rewards)
            parts.append(f"reward {self._rewards[-1]:.2f} (mean {mean:.2f})")
        if self._rate is not None:
            parts.append(f"{self._rate:.0f} tok/s")
        parts.append(f"eta {clock(None if left is None else left + self._evaluation_seconds)}")
        title = f"rollout {done + 1}/{total}"
        self._display.update(title, " · ".join(parts), completed=done + 0.5 * fraction, total=total)

    # -- evaluation ----------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        self._batches_evaluated, self._verdicts = 0, []
        self._show_evaluation(trainer, 0.0)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._batches_evaluated += 1
        # Of what is trained on: a rate over in-domain and other tasks together says little.
        own = [item for item in outputs if item.prompt.task in pl_module.tasks]
        verdicts = [item.scores[pl_module.tasks[item.prompt.task].primary] for item in own]
        self._verdicts += [verdict for verdict in verdicts if verdict is not None]
        self._show_evaluation(trainer, 0.0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_seconds = time.perf_counter() - self._started
        took = clock(self._evaluation_seconds)
        self._display.line(f"evaluation{_passed(self._verdicts)} in {took}")
        if trainer.state.fn != "fit":
            self._display.stop()

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _show_evaluation(self, trainer: Trainer, fraction: float) -> None:
        if trainer.sanity_checking:
            batches = trainer.num_sanity_val_batches
        else:
            batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        total = sum(batches) if isinstance(batches, list) else batches
        done = self._batches_evaluated + fraction
        elapsed = time.perf_counter() - self._started
        left = elapsed / done * (total - done) if done else None
        info = f"{_passed(self._verdicts)} eta {clock(left)}".strip()
        self._display.update("evaluating", info, completed=done, total=total)


def pass_share(module: FineTuning, batch: RolloutBatch) -> float | None:
    """Share of the rollout's completions that their task's primary component passes."""
    in_batch = component_names(module.tasks)
    verdicts = []
    for index in range(len(batch.rewards)):
        task = batch.rollouts[index // batch.group_size].prompt.task
        primary = in_batch[task, module.tasks[task].primary]
        verdicts.append(float(batch.components[primary][index]))
    judged = [verdict for verdict in verdicts if not math.isnan(verdict)]
    return sum(judged) / len(judged) if judged else None


def _passed(verdicts: list[float]) -> str:
    return f" pass {sum(verdicts) / len(verdicts):.2f} of {len(verdicts)}" if verdicts else ""
