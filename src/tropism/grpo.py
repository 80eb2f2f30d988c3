"""GRPO as a LightningModule: the sequence of one step, no maths.

How one step here differs from the textbook loop:
1. one Lightning batch is one *rollout batch* (P prompts x G completions); limits, checkpoints
   and cadences count rollouts, while ``global_step`` counts optimizer steps;
2. observers (callbacks) are told between scoring and update, where Lightning has no hook;
3. completions without advantage are left out of every forward, denominators unchanged;
4. a rollout in which no group carries signal takes no optimizer step at all;
5. the next rollout may be sampled meanwhile, off-policy by one update (``rollouts_ahead``).

    tropism fit --config experiments/quickstart.yaml
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tropism.experience import Experience
from tropism.finetuning import FineTuning
from tropism.measurements import metrics as names
from tropism.measurements.step_metrics import Update, step_metrics
from tropism.models import LoRA, Model
from tropism.objective.settings import Objective
from tropism.optimization import AdamW
from tropism.rollouts.ahead import Ahead, Drawn, check_ahead
from tropism.rollouts.engine import RemoteEngine, RolloutEngine, Sampling, require_small_gap
from tropism.shaping import SoftOverlong
from tropism.tasks.extra import ExtraReward
from tropism.timing import timed
from tropism.types import Prompt, RolloutBatch
from tropism.update import accumulate_gradients, prepare


class GRPO(FineTuning):
    """Group Relative Policy Optimization (2402.03300) of a small language model.

    Args:
        model: Which weights to start from.
        lora: Adapters on every linear; null trains all weights.
        group_size: G, completions per prompt.
        sampling: How completions are drawn in training (evaluation is greedy).
        objective: Loss, clipping, KL, scaling.
        optimizer: AdamW and its schedule.
        reward_weights: component (or ``task.component``) -> weight; null means 1 for each.
        extra_rewards: Components that every task carries besides its own (``tropism.shaping``).
        engine: Where completions come from; the trainer's own modules where null.
        rollouts_ahead: 1 samples the next rollout, from the policy of now, while this one is
            learnt from: the engine and the trainer work at the same time, and what is learnt from
            is one update old. Needs ``objective.mismatch``. 0 samples each rollout at its turn.
        max_tokens_per_microbatch: Tokens of one training forward, each prompt once; bounds memory.
            1280 is about as fast as more.
        max_rollouts_without_signal: So many rollouts in a row without any gradient stop the run.
        shuffle_rewards: Control: each group's rewards are dealt out anew at random, so that
            nothing can be learnt and whatever a policy then acts on is noise.
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
        extra_rewards: list[ExtraReward] | None = None,
        engine: RolloutEngine | None = None,
        rollouts_ahead: int = 0,
        max_tokens_per_microbatch: int = 1280,
        max_rollouts_without_signal: int = 16,
        shuffle_rewards: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            {
                "model": asdict(model),
                "lora": None if lora is None else asdict(lora),
                "group_size": group_size,
                "sampling": asdict(sampling),
                "objective": asdict(objective),
                "optimizer": asdict(optimizer),
                "reward_weights": reward_weights,
                "rollouts_ahead": rollouts_ahead,
                "max_tokens_per_microbatch": max_tokens_per_microbatch,
                "max_rollouts_without_signal": max_rollouts_without_signal,
                "shuffle_rewards": shuffle_rewards,
                "seed": seed,
            },
            model=model,
            lora=lora,
            group_size=group_size,
            sampling=sampling,
            optimizer=optimizer,
            reward_weights=reward_weights,
            extra_rewards=extra_rewards,
            engine=engine,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            seed=seed,
        )
        if max_rollouts_without_signal < 1:
            raise ValueError(
                f"max_rollouts_without_signal={max_rollouts_without_signal}: give at least 1."
            )
        if group_size < 2:
            raise ValueError(
                f"group_size={group_size}: GRPO compares completions of one prompt with each "
                "other; give at least 2."
            )
        is_punished = any(isinstance(reward, SoftOverlong) for reward in self.extra_rewards)
        if is_punished and objective.overlong_buffer is not None:
            raise ValueError(
                f"objective.overlong_buffer={objective.overlong_buffer} and SoftOverlong in "
                "extra_rewards would punish the same tokens twice; leave one of the two out."
            )
        check_ahead(
            rollouts_ahead,
            mismatch=objective.mismatch,
            dropout=0.0 if lora is None else lora.dropout,
            engine=engine,
        )
        self.objective = objective
        self.rollouts_ahead = rollouts_ahead
        self._ahead = Ahead()
        self.shuffle_rewards = shuffle_rewards
        self.max_rollouts_without_signal = max_rollouts_without_signal
        self.rollouts_without_signal = 0
        self.num_groups: int | None = None

    def configure_model(self) -> None:
        is_loaded = self.network is not None
        super().configure_model()
        if not is_loaded and self.objective.beta > 0 and not self.policy.uses_lora:
            self.policy.keep_reference()

    def num_updates_per_rollout(self) -> int:
        return self.objective.num_iterations

    # -- the step -----------------------------------------------------------------------------

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        try:
            self._step(batch)
        except BaseException:  # Ctrl-C too: nothing goes on in a thread that nobody waits for
            self._ahead.cancel()
            raise

    def _step(self, batch: list[Prompt]) -> None:
        scored, drawn = self._collect(batch)
        with timed(scored.seconds, "probe"):
            self._tell_scored(scored)
        staleness = 0 if drawn is None else self.trainer.global_step - drawn.step
        metrics = self._update(scored, staleness)
        if self.rollouts_ahead:
            metrics[names.STALENESS] = float(staleness)
        if drawn is not None:  # not what the trainer waited for them
            metrics[names.TOKENS_PER_SECOND] = (metrics["tokens"] or 0) / drawn.seconds
        self._tell_after_update(scored, metrics)
        self.rollout += 1
        refresh = self.objective.reference_every
        if refresh is not None and self.rollout % refresh == 0:
            self.policy.keep_reference()
        self._stop_without_signal(had_signal=bool(metrics["num_updates"]))

    def _collect(self, prompts: list[Prompt]) -> tuple[RolloutBatch, Drawn | None]:
        """This rollout, and what was sampled of it ahead; the next one is begun meanwhile."""
        seconds: dict[str, float] = {}
        with timed(seconds, "rollout"):
            drawn = self._ahead.take(prompts, rollout=self.rollout)
        if drawn is None:
            scored = self.experience.collect(prompts[: self.num_groups], rollout=self.rollout)
        else:
            scored = replace(self.experience, group_size=drawn.group_size).collect(
                prompts[: len(drawn.rollouts)], rollout=self.rollout, drawn=drawn.rollouts
            )
        with timed(seconds, "rollout"):
            self._sample_ahead()
        scored.seconds["rollout"] += seconds["rollout"]
        return scored, drawn

    def _sample_ahead(self) -> None:
        """Begin with the next rollout, where there is one and it is to be sampled ahead."""
        following = self.rollout + 1
        if self.rollouts_ahead and following < self.trainer.num_training_batches:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self._ahead.begin(
                self.engine,
                data.prompts_of(following)[: self.num_groups],
                group_size=self.group_size,
                sampling=self.sampling,
                seed=self.seed,
                rollout=following,
                step=self.trainer.global_step,
            )

    def resize_rollouts(self, *, num_groups: int, group_size: int) -> None:
        """From the next rollout on: prompts per rollout and completions per prompt.

        A rollout that is sampled ahead keeps the sizes it was begun with.

        Raises:
            ValueError: More prompts than the data module hands out, or fewer than 2 completions.
        """
        most: int = self.trainer.datamodule.prompts_per_rollout  # type: ignore[attr-defined]
        if not 1 <= num_groups <= most or group_size < 2:
            raise ValueError(
                f"num_groups={num_groups}, group_size={group_size}: give 1 to {most} groups (the "
                "config's batch_size / group_size) of at least 2."
            )
        self.num_groups, self.group_size = num_groups, group_size

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
            shuffle_rewards=self.shuffle_rewards,
            progress=self._report_progress,
        )

    def _update(self, batch: RolloutBatch, staleness: int) -> dict[str, float | None]:
        optimizer: Any = self.optimizers()
        update = Update(learning_rate=optimizer.param_groups[0]["lr"])
        with timed(batch.seconds, "train"):
            prepared = prepare(
                batch,
                self.policy,
                self.objective,
                max_completion_length=self.sampling.max_new_tokens,
                temperature=self.sampling.temperature,
                max_tokens=self.max_tokens_per_microbatch,
                lowest_trained=self._lowest_trained(),
            )
        if prepared.micro_batches:
            self._tell_before_update(batch)
        with timed(batch.seconds, "train"):
            for _ in range(self.objective.num_iterations if prepared.micro_batches else 0):
                rate = optimizer.param_groups[0]["lr"]
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
                    gap = update.first.mean("sampler_gap")
                    require_small_gap(self.engine, gap, staleness=staleness)
                update.grad_norm = self._optimizer_step()
                update.num_updates += 1
                self._tell_step_taken(
                    batch, loss=update.last.loss, grad_norm=update.grad_norm, lr=rate
                )
            optimizer.zero_grad(set_to_none=True)
            self.engine.sync()
        metrics = step_metrics(
            batch,
            update,
            has_reference=self.objective.beta > 0,
            trainable_params=self.num_trainable(),
            corrects_mismatch=self.objective.mismatch != "none",
        )
        own = self.engine.metrics() if isinstance(self.engine, RemoteEngine) else {}
        return {**metrics, **own}

    def _lowest_trained(self) -> int:
        """Layers below it are the same in every pass over a rollout."""
        if self.placement is None:
            return 0
        return self.policy.lowest_layer(s for s in self.policy.sites if self.trains_at(s))

    def _stop_without_signal(self, *, had_signal: bool) -> None:
        self.rollouts_without_signal = 0 if had_signal else self.rollouts_without_signal + 1
        if self.rollouts_without_signal >= self.max_rollouts_without_signal:
            raise RuntimeError(
                f"{self.rollouts_without_signal} rollouts in a row had no group with differing "
                "rewards, so nothing was learnt from them. Choose prompts that the model gets "
                "right sometimes, shape the reward, raise group_size or sampling.temperature (or "
                "raise max_rollouts_without_signal)."
            )

    def on_train_end(self) -> None:
        self._ahead.cancel()  # of a run that is stopped early
        super().on_train_end()

    # -- checkpoints --------------------------------------------------------------------------

    def run_state(self) -> dict[str, Any]:
        state = {
            **super().run_state(),
            "rollouts_without_signal": self.rollouts_without_signal,
            "sizes": (self.num_groups, self.group_size),
            "ahead": self._ahead.state_dict(),
        }
        if self.objective.reference_every is not None:
            state["reference"] = self.policy.reference_state()
        return state

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        super().load_run_state(state)
        self.rollouts_without_signal = state["rollouts_without_signal"]
        self.num_groups, self.group_size = state["sizes"]
        if self.rollouts_ahead:
            self._ahead.load_state_dict(state.get("ahead"))
        if "reference" in state:
            self.policy.load_reference_state(state["reference"])
