"""What GRPO and SFT share, so that a comparison of the two differs in the objective alone.

Data, prompt template, LoRA or full-parameter placement, optimizer, schedule, evaluation, observers
and checkpoints are here; a subclass is one way to make a rollout batch and to learn from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from tropism.lora.optimizer_state import load_by_name
from tropism.lora.placement import Placement
from tropism.measurements.layer_names import LinearSite
from tropism.models import LoRA, Model, load_policy
from tropism.optimization import AdamW
from tropism.policy import Policy
from tropism.resume import apply_learning_rate, check_same_policy, check_same_rewards
from tropism.rewards import Rewards
from tropism.rollouts.engine import RolloutEngine, Sampling
from tropism.rollouts.transformers_engine import TransformersEngine, check_context
from tropism.scoring import score_rollouts
from tropism.tasks.base import Task
from tropism.tasks.extra import ExtraReward, carry
from tropism.types import GenerationProgress, Prompt, RolloutBatch, ScoredCompletion, StepObserver
from tropism.update import NonFiniteError


class FineTuning(L.LightningModule):
    """A policy that is tuned on one rollout batch after the other.

    Args:
        settings: Hyperparameters as plain values, for checkpoints and records.
        model: Which weights to start from.
        lora: Adapters on every linear; null trains all weights.
        group_size: Completions per prompt.
        sampling: How completions are drawn.
        optimizer: AdamW and its schedule.
        reward_weights: component (or ``task.component``) -> weight; null means 1 for each.
        extra_rewards: Components that every task carries besides its own (``tropism.shaping``).
        engine: Where completions come from; the trainer's own modules where null.
        max_tokens_per_microbatch: Tokens of one training forward; bounds memory.
        seed: Keys whatever is drawn.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        model: Model,
        lora: LoRA | None,
        group_size: int,
        sampling: Sampling,
        optimizer: AdamW,
        reward_weights: dict[str, float] | None,
        extra_rewards: Sequence[ExtraReward] | None,
        engine: RolloutEngine | None,
        max_tokens_per_microbatch: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(dict(settings))
        if max_tokens_per_microbatch < 1:
            raise ValueError(
                f"max_tokens_per_microbatch={max_tokens_per_microbatch}: give at least 1."
            )
        self.automatic_optimization = False
        self.model_settings, self.lora = model, lora
        self.group_size, self.sampling = group_size, sampling
        self.optimizer_settings = optimizer
        self.reward_weights = reward_weights
        self.extra_rewards = tuple(extra_rewards or ())
        self.engine: RolloutEngine = engine if engine is not None else TransformersEngine()
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.seed = seed
        self.rollout = 0
        self.observers: list[StepObserver] = []
        self.policy: Policy
        self.network: nn.Module | None = None
        self.placement: Placement | None = None
        self.tasks: dict[str, Task] = {}
        self.out_of_domain_tasks: dict[str, Task] = {}
        self.rewards: Rewards
        self.gradient_shares: dict[str, float | None] = {}
        self._should_keep_start = False

    # -- set-up -------------------------------------------------------------------------------

    def add_observer(self, observer: StepObserver) -> None:
        """Have ``observer`` called at the points of each step; callbacks do so in ``setup``."""
        if observer not in self.observers:
            self.observers.append(observer)

    def keep_starting_policy(self) -> None:
        """Have ``policy.starting`` in full-parameter runs too; callbacks ask in ``setup``."""
        self._should_keep_start = True

    def setup(self, stage: str) -> None:
        check_one_device(self.trainer)
        _check_trainer(self.trainer)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.tasks = carry(data.tasks, self.extra_rewards)
        self.out_of_domain_tasks = carry(data.out_of_domain_tasks, self.extra_rewards)
        if not hasattr(self, "rewards"):
            self.rewards = Rewards(self.reward_weights, tasks=self.tasks)

    @property
    def evaluated_tasks(self) -> dict[str, Task]:
        """The tasks that are trained on, then those that are only evaluated."""
        return {**self.tasks, **self.out_of_domain_tasks}

    def configure_model(self) -> None:
        if self.network is None:
            self._load()
        if self._should_keep_start and self.rollout == 0:  # a checkpoint is loaded after this
            self.policy.keep_start()

    def _load(self) -> None:
        self.policy = load_policy(self.model_settings, self.lora)
        self.network = self.policy.model  # registers the parameters with Lightning
        if self.lora is not None:
            self.placement = Placement(
                self.policy.sites, self.policy.lora_layer, max_rank=self.lora.rank
            )
        self.engine.bind(self.policy)
        in_trainer = self._trainer is not None
        for reward in self.extra_rewards:
            reward.prepare(
                max_new_tokens=self.sampling.max_new_tokens,
                device=self.trainer.strategy.root_device if in_trainer else self.device,
            )

    def num_updates_per_rollout(self) -> int:
        """Optimizer steps on one rollout batch."""
        return 1

    def configure_optimizers(self) -> Any:
        rollouts: int = self.trainer.datamodule.num_rollouts  # type: ignore[attr-defined]
        optimizer, scheduler = self.optimizer_settings.build(
            self.policy.named_trainable(), num_steps=rollouts * self.num_updates_per_rollout()
        )
        load_by_name(optimizer)
        return [optimizer], [scheduler]

    def raw_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself, without Lightning's wrapper."""
        wrapped: Any = self.optimizers()
        optimizer: torch.optim.Optimizer = wrapped.optimizer
        return optimizer

    def on_train_start(self) -> None:
        if self.placement is not None:
            self.placement.reassert()
            self.placement.check()

    def num_trainable(self) -> int:
        """Scalars that train now."""
        return (
            self.policy.num_trainable()
            if self.placement is None
            else (self.placement.num_trainable())
        )

    def trains_at(self, site: LinearSite) -> bool:
        """Whether this linear's weight, or its adapter, trains now."""
        return self.placement is None or self.placement.entry(site).state == "TRAIN"

    def on_fit_start(self) -> None:
        """Every prompt is checked against the context before the first one is sampled."""
        prompts = self.trainer.datamodule.all_prompts()  # type: ignore[attr-defined]
        encoded = [self.policy.encode(prompt) for prompt in prompts]
        check_context(prompts, encoded, self.sampling, self.policy.context_length)

    # -- parts of a step ----------------------------------------------------------------------

    def _report_progress(self, progress: GenerationProgress) -> None:
        for observer in self.observers:
            observer.generation_progress(self, progress)

    def _tell_scored(self, batch: RolloutBatch) -> None:
        for observer in self.observers:
            observer.rollout_scored(self, batch)

    def _tell_before_update(self, batch: RolloutBatch) -> None:
        for observer in self.observers:
            observer.before_update(self, batch)

    def _tell_step_taken(
        self, batch: RolloutBatch, *, loss: float, grad_norm: float, lr: float
    ) -> None:
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr}
        for observer in self.observers:
            observer.step_taken(self, batch, metrics)

    def _tell_after_update(self, batch: RolloutBatch, metrics: Mapping[str, float | None]) -> None:
        for observer in self.observers:
            observer.after_update(self, batch, metrics)

    def _optimizer_step(self) -> float:
        """Clip, step and advance the schedule, at the plan's pace for each adapter.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: The gradient is not finite; no step was taken.
        """
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        placement = self.placement
        if placement is not None:
            placement.mask_gradients()
        limit = self.optimizer_settings.max_grad_norm
        norm = nn.utils.clip_grad_norm_(
            self.policy.named_trainable().values(), float("inf") if limit is None else limit
        )
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm is {float(norm)} in rollout {self.rollout}. No step was "
                "taken. Lower optimizer.learning_rate, and resume from the last checkpoint."
            )
        if placement is not None:
            placement.scale_learning_rates(self.raw_optimizer(), scheduler.get_last_lr()[0])
        optimizer.step()
        if placement is not None:
            placement.after_step()
        scheduler.step()
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
            ScoredCompletion(rollout.prompt, rollout.completions[0], scores[0])
            for rollout, scores in zip(
                rollouts, score_rollouts(self.evaluated_tasks, rollouts), strict=True
            )
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

    def run_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the run besides weights and optimizer."""
        return {
            "rollout": self.rollout,
            "reward_weights": self.rewards.state_dict(),
            "extra_rewards": [reward.identity() for reward in self.extra_rewards],
            "placement": None if self.placement is None else self.placement.state_dict(),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``run_state`` gave."""
        self.rollout = state["rollout"]
        if self.placement is not None:
            self.placement.load_state_dict(state["placement"])
        if self.tasks:  # none where a checkpoint is loaded outside a Trainer
            self.rewards.load_state_dict(state["reward_weights"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # With this, `GRPO.load_from_checkpoint` rebuilds the settings' classes from plain values.
        checkpoint["hyper_parameters"]["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        checkpoint["tropism"] = self.run_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()
        check_same_policy(checkpoint["hyper_parameters"], self.hparams)
        if self._trainer is not None and self.trainer.state.fn == "fit":
            apply_learning_rate(checkpoint, self.hparams["optimizer"])
            check_same_rewards(
                checkpoint["tropism"].get("extra_rewards", ()),
                [reward.identity() for reward in self.extra_rewards],
            )
        self.load_run_state(checkpoint["tropism"])


def check_one_device(trainer: L.Trainer) -> None:
    """Refuse several processes: each would sample, train and count the same prompts.

    Raises:
        ValueError: There are several.
    """
    if trainer.world_size > 1:
        raise ValueError(
            f"trainer.devices={trainer.num_devices}, trainer.num_nodes={trainer.num_nodes}: prompts"
            " are not shared out among devices yet; add --trainer.devices 1 --trainer.num_nodes 1."
        )


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
