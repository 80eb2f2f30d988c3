"""GRPO as a LightningModule: the sequence of one step, no maths.

How one step here differs from the textbook loop:
1. one Lightning batch is one *rollout batch* (P prompts x G completions); limits, checkpoints
   and cadences count rollouts, while ``global_step`` counts optimizer steps;
2. observers (callbacks) are told between scoring and update, where Lightning has no hook;
3. completions without advantage are left out of every forward, denominators unchanged;
4. a rollout in which no group carries signal takes no optimizer step at all.

    tropism fit --config experiments/quickstart.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from tropism.experience import Experience
from tropism.measurements.step_metrics import Update, step_metrics
from tropism.models import LoRA, Model, load_policy
from tropism.objective.settings import Objective
from tropism.optimization import AdamW
from tropism.policy import Policy
from tropism.resume import apply_learning_rate, check_same_policy
from tropism.rewards import Rewards
from tropism.rollouts.engine import RolloutEngine, Sampling
from tropism.rollouts.transformers_engine import TransformersEngine, check_context
from tropism.tasks.base import Task
from tropism.timing import timed
from tropism.types import (
    GenerationProgress,
    Prompt,
    RolloutBatch,
    ScoredCompletion,
    StepObserver,
)
from tropism.update import NonFiniteError, accumulate_gradients, prepare


class GRPO(L.LightningModule):
    """Group Relative Policy Optimization (2402.03300) of a small language model.

    Args:
        model: Which weights to start from.
        lora: Adapters on every linear; null trains all weights.
        group_size: G, completions per prompt.
        sampling: How completions are drawn in training (evaluation is greedy).
        objective: Loss, clipping, KL, scaling.
        optimizer: AdamW and its schedule.
        reward_weights: component (or ``task.component``) -> weight; null means 1 for each.
        engine: Where completions come from; the trainer's own modules where null.
        max_tokens_per_microbatch: Padded tokens of one training forward; bounds memory.
        max_rollouts_without_signal: So many rollouts in a row without any gradient stop the run.
        seed: Keys the sampling; the CLI takes it from ``seed_everything``.
    """

    def __init__(
        self,
        model: Model = Model(),
        lora: LoRA | None = LoRA(),
        group_size: int = 8,
        sampling: Sampling = Sampling(),
        objective: Objective = Objective(),
        optimizer: AdamW = AdamW(),
        reward_weights: dict[str, float] | None = None,
        engine: RolloutEngine | None = None,
        max_tokens_per_microbatch: int = 4096,
        max_rollouts_without_signal: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(
            {
                "model": asdict(model),
                "lora": None if lora is None else asdict(lora),
                "group_size": group_size,
                "sampling": asdict(sampling),
                "objective": asdict(objective),
                "optimizer": asdict(optimizer),
                "reward_weights": reward_weights,
                "max_tokens_per_microbatch": max_tokens_per_microbatch,
                "max_rollouts_without_signal": max_rollouts_without_signal,
                "seed": seed,
            }
        )
        for name, value in (
            ("max_tokens_per_microbatch", max_tokens_per_microbatch),
            ("max_rollouts_without_signal", max_rollouts_without_signal),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if group_size < 2:
            raise ValueError(
                f"group_size={group_size}: GRPO compares completions of one prompt with each "
                "other; give at least 2."
            )
        self.automatic_optimization = False
        self.model_settings, self.lora = model, lora
        self.group_size, self.sampling, self.objective = group_size, sampling, objective
        self.optimizer_settings = optimizer
        self.reward_weights = reward_weights
        self.engine: RolloutEngine = engine if engine is not None else TransformersEngine()
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.max_rollouts_without_signal = max_rollouts_without_signal
        self.seed = seed
        self.rollout = 0
        self.rollouts_without_signal = 0
        self.observers: list[StepObserver] = []
        self.policy: Policy
        self.network: nn.Module | None = None
        self.tasks: dict[str, Task] = {}
        self.rewards: Rewards

    # -- set-up -------------------------------------------------------------------------------

    def add_observer(self, observer: StepObserver) -> None:
        """Have ``observer`` called at the points of each step; callbacks do so in ``setup``."""
        if observer not in self.observers:
            self.observers.append(observer)

    def setup(self, stage: str) -> None:
        _check_trainer(self.trainer)
        self.tasks = {task.name: task for task in self.trainer.datamodule.tasks}  # type: ignore[attr-defined]
        if not hasattr(self, "rewards"):
            self.rewards = Rewards(self.reward_weights, tasks=self.tasks)

    def configure_model(self) -> None:
        if self.network is not None:
            return
        self.policy = load_policy(self.model_settings, self.lora)
        if self.objective.beta > 0 and not self.policy.uses_lora:
            self.policy.keep_reference()
        self.network = self.policy.model  # registers the parameters with Lightning
        self.engine.bind(self.policy)

    def configure_optimizers(self) -> Any:
        steps = self.trainer.datamodule.num_rollouts * self.objective.num_iterations  # type: ignore[attr-defined]
        optimizer, scheduler = self.optimizer_settings.build(
            self.policy.named_trainable(), num_steps=steps
        )
        return [optimizer], [scheduler]

    def on_fit_start(self) -> None:
        """Every prompt is checked against the context before the first one is sampled."""
        prompts = self.trainer.datamodule.all_prompts()  # type: ignore[attr-defined]
        encoded = [self.policy.encode(prompt) for prompt in prompts]
        check_context(prompts, encoded, self.sampling, self.policy.context_length)

    # -- the step -----------------------------------------------------------------------------

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        scored = self.experience.collect(batch, rollout=self.rollout)
        with timed(scored.seconds, "probe"):
            for observer in self.observers:
                observer.rollout_scored(self, scored)
        metrics = self._update(scored)
        for observer in self.observers:
            observer.after_update(self, scored, metrics)
        if metrics["num_updates"]:
            self.rollouts_without_signal = 0
        else:
            self.rollouts_without_signal += 1
        self.rollout += 1
        refresh = self.objective.reference_every
        if refresh is not None and self.rollout % refresh == 0:
            self.policy.keep_reference()
        if self.rollouts_without_signal >= self.max_rollouts_without_signal:
            raise RuntimeError(
                f"{self.rollouts_without_signal} rollouts in a row had no group with differing "
                "rewards, so nothing was learnt from them. Choose prompts that the model gets "
                "right sometimes, shape the reward, raise group_size or sampling.temperature (or "
                "raise max_rollouts_without_signal)."
            )

    @property
    def experience(self) -> Experience:
        """Makes rollout batches with the weights and settings of now."""
        return Experience(
            engine=self.engine,
            tasks=self.tasks,
            rewards=self.rewards,
            objective=self.objective,
            sampling=self.sampling,
            group_size=self.group_size,
            seed=self.seed,
            progress=self._report_progress,
        )

    def _report_progress(self, progress: GenerationProgress) -> None:
        for observer in self.observers:
            observer.generation_progress(self, progress)

    def _update(self, batch: RolloutBatch) -> dict[str, float | None]:
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        update = Update(learning_rate=optimizer.param_groups[0]["lr"])
        with timed(batch.seconds, "train"):
            prepared = prepare(
                batch,
                self.policy,
                self.objective,
                max_completion_length=self.sampling.max_new_tokens,
                temperature=self.sampling.temperature,
                max_tokens=self.max_tokens_per_microbatch,
            )
        if prepared.micro_batches:
            for observer in self.observers:
                observer.before_update(self, batch)
        with timed(batch.seconds, "train"):
            for _ in range(self.objective.num_iterations if prepared.micro_batches else 0):
                optimizer.zero_grad(set_to_none=True)
                update.last = accumulate_gradients(
                    prepared,
                    self.policy,
                    self.objective,
                    temperature=self.sampling.temperature,
                    backward=self.manual_backward,
                )
                if update.num_updates == 0:
                    update.first = update.last
                update.grad_norm = self._clip_gradients()
                optimizer.step()
                scheduler.step()
                update.num_updates += 1
            optimizer.zero_grad(set_to_none=True)
            self.engine.sync()
        return step_metrics(
            batch,
            update,
            has_reference=self.objective.beta > 0,
            trainable_params=self.policy.num_trainable(),
        )

    def _clip_gradients(self) -> float:
        limit = self.optimizer_settings.max_grad_norm
        norm = nn.utils.clip_grad_norm_(
            self.policy.named_trainable().values(), float("inf") if limit is None else limit
        )
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} in rollout {self.rollout}. No step was "
                "taken. Lower optimizer.learning_rate, and resume from the last checkpoint."
            )
        return float(norm)

    def on_train_end(self) -> None:
        if self.trainer.global_step == 0:
            rank_zero_warn(
                "No optimizer step was taken: in no rollout did the rewards of a group differ. The "
                "policy is still the one that the run started from."
            )

    # -- evaluation ---------------------------------------------------------------------------

    def validation_step(  # type: ignore[override]  # callbacks take whatever it returns
        self, batch: list[Prompt], batch_idx: int
    ) -> list[ScoredCompletion]:
        """Greedy answers to held-out prompts, scored; the Evaluation callback gathers them."""
        rollouts = self.engine.generate(
            batch,
            group_size=1,
            sampling=self.sampling,
            seed=self.seed,
            rollout=self.rollout,
            greedy=True,
            progress=self._report_progress,
        )
        return [
            ScoredCompletion(
                rollout.prompt, rollout.completions[0], self.experience.score(rollout)[0]
            )
            for rollout in rollouts
        ]

    def test_step(  # type: ignore[override]
        self, batch: list[Prompt], batch_idx: int
    ) -> list[ScoredCompletion]:
        return self.validation_step(batch, batch_idx)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained, by name; the frozen base is found again from ``model``."""
        names = self._trained_names()
        complete = super().state_dict(*args, **options)
        return {name: value for name, value in complete.items() if name in names}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what is trained.

        Raises:
            ValueError: A trained tensor is missing, unknown or of another shape (never skipped).
        """
        own = {f"network.{name}": p.shape for name, p in self.policy.named_trainable().items()}
        wrong = sorted(
            name
            for name in own.keys() | state_dict.keys()
            if name not in own or name not in state_dict or own[name] != state_dict[name].shape
        )
        if wrong:
            raise ValueError(
                f"the checkpoint does not fit this run: {len(wrong)} trained tensors are "
                f"missing, unknown or of another shape, the first {wrong[0]!r}. Use the config of "
                "the run that wrote it (config.yaml in its folder)."
            )
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        found.missing_keys.clear()  # the frozen base
        return found

    def _trained_names(self) -> set[str]:
        if self.network is None:
            return set()
        return {f"network.{name}" for name in self.policy.named_trainable()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # With this, `GRPO.load_from_checkpoint` rebuilds the settings' classes from plain values.
        checkpoint["hyper_parameters"]["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        checkpoint["tropism"] = {
            "rollout": self.rollout,
            "rollouts_without_signal": self.rollouts_without_signal,
            "reward_weights": self.rewards.state_dict(),
        }
        if self.objective.reference_every is not None:
            checkpoint["tropism"]["reference"] = self.policy.reference_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()
        check_same_policy(checkpoint["hyper_parameters"], self.hparams)
        if self._trainer is not None and self.trainer.state.fn == "fit":
            apply_learning_rate(checkpoint, self.hparams["optimizer"])
        state = checkpoint["tropism"]
        self.rollout = state["rollout"]
        self.rollouts_without_signal = state["rollouts_without_signal"]
        if "reference" in state:
            self.policy.load_reference_state(state["reference"])
        if self.tasks:  # none where a checkpoint is loaded outside a Trainer
            self.rewards.load_state_dict(state["reward_weights"])


def _check_trainer(trainer: L.Trainer) -> None:
    """Refuse settings of the Trainer that would not do here what they say."""
    if trainer.precision != "32-true":
        raise ValueError(
            f"trainer.precision={trainer.precision!r}: leave it at 32-true. The base has the dtype "
            "of model.dtype, adapters have fp32 masters, and the sampler computes as the trainer."
        )
    if trainer.max_epochs != 1 or trainer.max_steps != -1:
        raise ValueError(
            f"trainer.max_epochs={trainer.max_epochs}, trainer.max_steps={trainer.max_steps}: a "
            "run is one pass over its rollouts, with an evaluation and an export at the end; set "
            "data.num_rollouts, and leave max_epochs at 1 and max_steps at -1."
        )
