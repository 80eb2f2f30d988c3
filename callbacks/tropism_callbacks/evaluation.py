"""Greedy evaluation on held-out prompts, before training, during and after, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table

from tropism.evaluation.metrics import TaskScores, baseline_rates
from tropism.evaluation.statistics import Estimate
from tropism.measurements import metrics as names
from tropism.types import Prompt, ScoredCompletion
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_scalars

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning


class Evaluation(Callback):
    """Turns Lightning's validation and test loops into pass rates.

    The sanity check before training, over the whole validation set
    (``trainer.num_sanity_val_steps: -1``), is the evaluation of the base; the validation at the
    end is that of the tuned policy; ``trainer.val_check_interval`` adds some between.

    Logs:
        ``eval/<task>/pass``, its bounds and ``eval/<task>/<component>`` over rollouts.
    Writes:
        ``records/evals.jsonl``, a row per task and evaluation, where the folder is this run's
        own: ``tropism validate`` on the folder of another run only prints. ``domain`` is ``in`` for
        the tasks that are trained on and ``out`` for the others.
    Changes:
        Nothing. Prints a table at the end: base, tuned, and each baseline of the task.
    """

    def __init__(self) -> None:
        self._scores: dict[str, TaskScores] = {}
        self._prompts: dict[str, list[Prompt]] = {}
        self._base: dict[str, Estimate] = {}
        self._latest: dict[str, Estimate] = {}
        self._baselines: dict[str, dict[str, Estimate]] = {}
        self._recorder: Recorder | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            steps = trainer.num_sanity_val_steps
            if 0 < steps < float("inf"):
                raise ValueError(
                    f"trainer.num_sanity_val_steps={steps}: Evaluation takes the sanity check for "
                    "the evaluation before training. Set -1 (all held-out prompts), or 0 for none."
                )
        is_own = trainer.log_dir is not None and (
            stage == "fit" or not (run_folder(trainer) / "run.json").exists()
        )
        self._recorder = None
        if is_own or stage == "fit":
            self._recorder = Recorder(run_folder(trainer), "evals", enabled=trainer.is_global_zero)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        assert self._recorder is not None
        # Rows of this very rollout count are the evaluation that the checkpoint was taken with.
        self._recorder.rewind(pl_module.rollout + 1)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._begin(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._begin(pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._take(outputs)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._take(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._conclude(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._conclude(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and (self._base or self._latest):
            self._print(pl_module, {"base": self._base, "tuned": self._latest})

    def summary(self) -> dict[str, Any]:
        """``{"evaluation": {task: {base, tuned, difference, baselines}}}`` for ``run.json``."""
        result = {}
        for task in dict.fromkeys([*self._base, *self._latest]):
            base, tuned = self._base.get(task), self._latest.get(task)
            result[task] = {
                "base": asdict(base) if base else None,
                "tuned": asdict(tuned) if tuned else None,
                "difference": tuned.value - base.value if base and tuned else None,
                "baselines": {n: asdict(rate) for n, rate in self._baselines[task].items()},
            }
        return {"evaluation": result}

    def state_dict(self) -> dict[str, Any]:
        return {"base": _plain(self._base), "latest": _plain(self._latest),
                "baselines": {task: _plain(r) for task, r in self._baselines.items()}}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base, self._latest = _rates(state_dict["base"]), _rates(state_dict["latest"])
        self._baselines = {task: _rates(r) for task, r in state_dict["baselines"].items()}

    def _begin(self, module: FineTuning) -> None:
        tasks = module.evaluated_tasks.items()
        self._scores = {name: TaskScores(task, module.device) for name, task in tasks}
        self._prompts = {name: [] for name, _ in tasks}

    def _take(self, scored: Sequence[ScoredCompletion]) -> None:
        for name, scores in self._scores.items():
            own = [item for item in scored if item.prompt.task == name]
            scores.update([item.scores for item in own])
            self._prompts[name] += [item.prompt for item in own]

    def _conclude(self, trainer: Trainer, module: FineTuning) -> None:
        rates: dict[str, Estimate] = {}
        scalars: dict[str, float | None] = {}
        for name, scores in self._scores.items():
            rate, means = scores.passed.estimate(), scores.component_means()
            if rate is None:
                continue
            rates[name] = rate
            task = module.evaluated_tasks[name]
            self._baselines[name] = baseline_rates(task, self._prompts[name])
            scalars[names.evaluation(name, names.PASS)] = rate.value
            scalars[names.evaluation(name, names.PASS_LOW)] = rate.low
            scalars[names.evaluation(name, names.PASS_HIGH)] = rate.high
            for component, mean in means.items():
                scalars[names.evaluation(name, component)] = mean
        if trainer.sanity_checking:
            self._base = rates
        else:
            self._latest = rates
        if self._recorder is not None:
            model = "model" if trainer.state.fn != "fit" else "tuned"
            compared = ("difference", "difference_low", "difference_high", "p", "p_corrected")
            rows = [
                {
                    "benchmark": name,
                    "domain": "in" if name in module.tasks else "out",
                    "split": "test" if trainer.testing else "validation",
                    "n": rate.n,
                    "value": rate.value,
                    "ci_low": rate.low,
                    "ci_high": rate.high,
                    "k": 1,
                    "temperature": 0.0,
                    "max_tokens": module.sampling.max_new_tokens,
                    "model": "base" if trainer.sanity_checking else model,
                    "metric": names.PASS,
                    "num_samples": 1,
                    **dict.fromkeys(compared),
                }
                for name, rate in rates.items()
            ]
            if trainer.state.fn == "fit":
                self._recorder.rewind(module.rollout)  # a resumed run writes its row again
            self._recorder.append(rows, rollout=module.rollout, step=trainer.global_step)
            log_scalars(trainer, scalars, x=module.rollout)
        if trainer.state.fn != "fit" and trainer.is_global_zero:
            self._print(module, {"model": rates})

    def _print(self, module: FineTuning, columns: Mapping[str, Mapping[str, Estimate]]) -> None:
        table = Table(title="Held-out prompts, greedy")
        for heading in ("task", "answers of", "n", "pass", "95 % interval"):
            table.add_column(heading, justify="right" if heading in ("n", "pass") else "left")
        for task, baselines in self._baselines.items():
            models = {name: rates[task] for name, rates in columns.items() if task in rates}
            lines = {**models, **{f"baseline {name}": rate for name, rate in baselines.items()}}
            label = task if task in module.tasks else f"{task} (out of domain)"
            for name, rate in lines.items():
                interval = f"{rate.low:.3f} - {rate.high:.3f}"
                table.add_row(label, name, str(rate.n), f"{rate.value:.3f}", interval)
            table.add_section()
        Console().print(table)


def _plain(rates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: asdict(rate) for name, rate in rates.items()}


def _rates(plain: Mapping[str, Any]) -> dict[str, Estimate]:
    return {name: Estimate(**fields) for name, fields in plain.items()}
