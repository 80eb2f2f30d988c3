"""How far the policy has drifted from its start, on tasks that are trained on and on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from tropism.evaluation.statistics import mean_interval
from tropism.loop.drift import Scope, answered, gold_answers, measure_drift
from tropism.measurements import metrics as names
from tropism.measurements.kl_drift import DIRECTIONS, Direction, TokenKL
from tropism.rollouts.engine import Sampling
from tropism.types import Prompt, Rollout
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_scalars

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning

Source = Literal["gold", "reference", "policy"]
NUM_RESAMPLES = 2_000


class KLDrift(Callback):
    """Measures KL between the starting policy and that of now, on validation prompts.

    Full-vocabulary, teacher-forced, at temperature 1, for each task of ``tasks`` and
    ``out_of_domain_tasks`` by itself. The starting policy is the base, or the adapter that the run
    started from; a full-parameter run keeps a copy of its first weights in CPU memory.

    Logs:
        ``drift/<task>/forward_kl`` = KL(starting || now), ``drift/<task>/reverse_kl`` =
        KL(now || starting).
    Writes:
        ``records/kl_drift.jsonl``, two rows per task and measurement: mean over tokens in nats, and
        a 95 % interval (bootstrap over prompts); positions that are not finite are left out and
        counted in ``num_dropped``. ``rollout`` counts as in ``evals``: rows of both tables with the
        same one are of the same weights.
    Changes:
        Nothing.

    Args:
        every_n_rollouts: Measure before training, after n, 2n, ... rollouts, and at the end.
        num_prompts: Validation prompts of each task, at most; the first ones.
        source: Whose answers the texts are: ``gold`` (the task's own right ones), ``reference``
            (sampled from the starting policy, once) or ``policy`` (sampled from that of now, each
            time). Reverse KL is at home on the last, forward KL on the others.
        scope: ``completion`` tokens, or ``all``: the prompt's too, as in 2507.10616.
    """

    def __init__(
        self,
        every_n_rollouts: int = 10,
        num_prompts: int = 128,
        source: Source = "gold",
        scope: Scope = "completion",
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1),
            ("num_prompts", num_prompts, 2),
        ):
            if value < least:
                raise ValueError(f"KLDrift.{name}={value}: give at least {least}.")
        for name, choice, choices in (
            ("source", source, ("gold", "reference", "policy")),
            ("scope", scope, ("completion", "all")),
        ):
            if choice not in choices:
                raise ValueError(f"KLDrift.{name}={choice!r}: choose from {choices}.")
        self.every_n_rollouts, self.num_prompts = every_n_rollouts, num_prompts
        self.source: Source = source
        self.scope: Scope = scope
        self._prompts: dict[str, list[Prompt]] = {}
        self._answers: dict[str, list[Rollout]] = {}  # those that stay the same
        self._sampled: dict[str, tuple[int, ...]] = {}  # prompt id -> the starting policy's answer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            pl_module.keep_starting_policy()  # type: ignore[operator]
            self._recorder = Recorder(
                run_folder(trainer), "kl_drift", enabled=trainer.is_global_zero
            )

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not pl_module.policy.knows_start:
            raise ValueError(
                f"KLDrift: all weights train, and {pl_module.rollout} rollouts changed them before "
                "this fit, so that those of the start are unknown. Fit a new module, with "
                "ckpt_path to go on from a checkpoint."
            )
        held_out = trainer.datamodule.held_out_prompts("validation")  # type: ignore[attr-defined]
        self._prompts = {task: p[: self.num_prompts] for task, p in held_out.items() if p}
        if not self._prompts:
            raise ValueError(
                "KLDrift measures on validation prompts, and there are none: set "
                "data.num_validation_prompts, or leave the callback out."
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.source == "gold":
            self._answers = self._gold(pl_module)
        elif self.source == "reference":
            self._answers = self._of_start(pl_module)
        if pl_module.rollout == 0:
            self._recorder.rewind(0)
            rows = self._measure(trainer, pl_module)
            assert all(not row["kl"] for row in rows), f"no drift before training, but {rows}"
        else:  # a row of this very rollout is older than the checkpoint, or of a run that ended
            self._recorder.rewind(pl_module.rollout + self._is_due(pl_module.rollout))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due(pl_module.rollout):
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if not self._is_due(pl_module.rollout):
            self._measure(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"sampled": self._sampled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sampled = state_dict["sampled"]

    def _is_due(self, rollout: int) -> bool:
        return rollout % self.every_n_rollouts == 0

    # -- answers --------------------------------------------------------------------------------

    def _gold(self, module: FineTuning) -> dict[str, list[Rollout]]:
        answers = {
            name: gold_answers(module.policy, module.evaluated_tasks[name], prompts)
            for name, prompts in self._prompts.items()
        }
        if without := [name for name, known in answers.items() if not known]:
            raise ValueError(
                f"KLDrift.source='gold', and the tasks {without} know no gold answer of any "
                "validation prompt: give `gold_column` (Rows), or take source `reference` or "
                "`policy`."
            )
        return answers

    def _of_start(self, module: FineTuning) -> dict[str, list[Rollout]]:
        if module.rollout == 0:
            answers = self._sample(module, rollout=-1)  # before the first
            self._sampled = {
                answer.prompt.id: answer.completions[0].token_ids
                for task in answers.values()
                for answer in task
            }
            return answers
        wanted = [prompt.id for prompts in self._prompts.values() for prompt in prompts]
        if missing := [prompt_id for prompt_id in wanted if prompt_id not in self._sampled]:
            raise ValueError(
                "KLDrift.source='reference': the checkpoint holds no answer of the starting policy "
                f"to {len(missing)} prompts, the first {missing[0]!r}. Resume with the run's own "
                "tasks and settings of KLDrift, or take source `gold` or `policy`."
            )
        return {
            name: [answered(module.policy, p, self._sampled[p.id]) for p in prompts]
            for name, prompts in self._prompts.items()
        }

    def _sample(self, module: FineTuning, *, rollout: int) -> dict[str, list[Rollout]]:
        return {
            name: module.engine.generate(
                prompts,
                group_size=1,
                sampling=Sampling(max_new_tokens=module.sampling.max_new_tokens),
                seed=module.seed,
                rollout=rollout,
            )
            for name, prompts in self._prompts.items()
        }

    # -- measuring ------------------------------------------------------------------------------

    def _measure(self, trainer: Trainer, module: FineTuning) -> Sequence[Mapping[str, Any]]:
        rollout = module.rollout
        is_new = self.source == "policy"
        answers = self._sample(module, rollout=rollout) if is_new else self._answers
        rows: list[dict[str, Any]] = []
        for name, rollouts in answers.items():
            limit = module.max_tokens_per_microbatch
            tokens = measure_drift(module.policy, rollouts, scope=self.scope, max_tokens=limit)
            rows += [
                {
                    "task": name,
                    "domain": "in" if name in module.tasks else "out",
                    "source": self.source,
                    "scope": self.scope,
                    "direction": direction,
                    **mean_over_tokens(tokens, direction),
                }
                for direction in DIRECTIONS
            ]
        self._recorder.append(rows, rollout=rollout, step=trainer.global_step)
        scalars = {names.drift(row["task"], row["direction"]): row["kl"] for row in rows}
        log_scalars(trainer, scalars, x=rollout)
        return rows


def mean_over_tokens(tokens: TokenKL, direction: Direction) -> dict[str, float | int | None]:
    """Columns ``kl``, ``ci_low``, ``ci_high`` and the counts; None where nothing is left."""
    values, prompts, num_dropped = tokens.kept(direction)
    num_prompts = len(prompts.unique())
    low = high = None
    if num_prompts > 1:
        estimate = mean_interval(
            values.double().numpy(),
            method="bootstrap",
            clusters=prompts.numpy(),
            num_resamples=NUM_RESAMPLES,
        )
        low, high = estimate.low, estimate.high
    return {
        "kl": float(values.double().mean()) if len(values) else None,
        "ci_low": low,
        "ci_high": high,
        "num_prompts": num_prompts,
        "num_tokens": len(values),
        "num_dropped": num_dropped,
    }
