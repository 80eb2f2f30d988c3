"""Supervised fine-tuning, the matched control of GRPO and its warm-up.

Everything but the objective is GRPO's: data, template, placement, optimizer, schedule, evaluation,
callbacks. A rollout batch holds traces (``tropism.traces``) instead of samples; they are scored as
samples would be, so that ``reward/*`` says how good the traces are.

1. completion-only loss: prompts carry none;
2. no padding: sequences are laid end to end, apart by their positions;
3. ``batch_size`` counts sequences, so that at ``group_size`` 1 a step sees as many as GRPO's.

    tropism fit --config experiments/organism_sft.yaml
    tropism fit --config experiments/organism.yaml --model.init_args.model.adapter RUN_OF_SFT
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from tropism.finetuning import FineTuning
from tropism.measurements.metrics import SAMPLER_GAP_MAX
from tropism.measurements.step_metrics import Sums, Update, step_metrics
from tropism.models import LoRA, Model
from tropism.objective.losses import token_weights
from tropism.optimization import AdamW
from tropism.rollouts.collate import training_batches
from tropism.rollouts.engine import RolloutEngine, Sampling
from tropism.scoring import component_tensors, score_rollouts
from tropism.tasks.extra import ExtraReward
from tropism.timing import timed
from tropism.traces import (
    Gold,
    Sampled,
    Trace,
    TraceContext,
    TraceFile,
    Traces,
    TraceSource,
    save_traces,
)
from tropism.types import Completion, Prompt, Rollout, RolloutBatch
from tropism.update import require_finite

TRACES_FILE = "traces.jsonl"


class SFT(FineTuning):
    """Maximises the likelihood of traces.

    Args:
        model: Which weights to start from.
        lora: Adapters on every linear; null trains all weights.
        traces: ``tropism.traces.Gold``, ``TraceFile`` or ``Sampled``.
        group_size: Traces of a prompt in one step, drawn among those that it has.
        sampling: Completion limit of the (greedy) evaluation.
        normalization: A step's loss is the mean over its ``tokens``, or the mean over its
            ``sequences`` of their own means.
        optimizer: AdamW and its schedule.
        reward_weights: As for GRPO; they weigh what the traces score, and train nothing.
        extra_rewards: Components that every task carries besides its own (``tropism.shaping``).
        engine: Where completions come from; the trainer's own modules where null.
        max_tokens_per_microbatch: Tokens of one training forward; bounds memory.
        seed: Keys which trace of a prompt is taken; the CLI takes it from ``seed_everything``.
    """

    def __init__(
        self,
        model: Model = Model(),
        lora: LoRA | None = LoRA(),
        traces: TraceSource = Gold(),
        group_size: int = 1,
        sampling: Sampling = Sampling(),
        normalization: Literal["tokens", "sequences"] = "tokens",
        optimizer: AdamW = AdamW(),
        reward_weights: dict[str, float] | None = None,
        extra_rewards: list[ExtraReward] | None = None,
        engine: RolloutEngine | None = None,
        max_tokens_per_microbatch: int = 2048,
        seed: int = 0,
    ) -> None:
        super().__init__(
            {
                "model": asdict(model),
                "lora": None if lora is None else asdict(lora),
                "group_size": group_size,
                "sampling": asdict(sampling),
                "normalization": normalization,
                "optimizer": asdict(optimizer),
                "reward_weights": reward_weights,
                "max_tokens_per_microbatch": max_tokens_per_microbatch,
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
        self.traces = traces
        self.normalization = normalization
        self._traces: Traces = {}

    def on_fit_start(self) -> None:
        """Get the traces; prompts without any are left out of the training set."""
        super().on_fit_start()
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        prompts: list[Prompt] = data.training_prompts()
        self._traces = self._collect(prompts)
        data.keep_training_prompts(self._traces.keys())
        self._check_context(prompts)
        dropped = len(prompts) - len(self._traces)
        if dropped:
            rank_zero_info(f"{dropped} of {len(prompts)} training prompts have no trace.")

    def _collect(self, prompts: list[Prompt]) -> Traces:
        context = TraceContext(
            self.policy, self.engine, self.tasks, self.seed, self._report_progress
        )
        folder = self.trainer.log_dir
        kept = Path(folder) / TRACES_FILE if folder is not None else None
        if self.rollout > 0 and kept is not None and kept.is_file():
            return TraceFile(str(kept)).collect(prompts, context)
        if self.rollout > 0 and isinstance(self.traces, Sampled):
            raise ValueError(
                f"{kept} is missing: the traces were sampled from the policy before training, "
                "which is not the one of this checkpoint. Start the run again."
            )
        traces = self.traces.collect(prompts, context)
        if kept is not None and self.trainer.is_global_zero:
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_traces(kept, traces)
        return traces

    def _check_context(self, prompts: list[Prompt]) -> None:
        limit = self.policy.context_length
        for prompt in prompts:
            for trace in self._traces.get(prompt.id, ()):
                num_tokens = len(self.policy.encode(prompt)) + len(trace.token_ids)
                if num_tokens > limit:
                    raise ValueError(
                        f"prompt {prompt.id!r} and a trace of it have {num_tokens} tokens, more "
                        f"than the model's context of {limit}. Leave that trace out."
                    )

    # -- the step -----------------------------------------------------------------------------

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        scored = self._demonstrate(batch)
        with timed(scored.seconds, "probe"):
            self._tell_scored(scored)
        self._tell_before_update(scored)
        metrics = self._update(scored)
        self._tell_after_update(scored, metrics)
        self.rollout += 1

    def _demonstrate(self, prompts: list[Prompt]) -> RolloutBatch:
        """A rollout batch of traces, each with an advantage of 1."""
        seconds: dict[str, float] = {}
        with timed(seconds, "reward"):
            rollouts = [
                Rollout(
                    prompt,
                    self.policy.encode(prompt),
                    tuple(
                        Completion(t.token_ids, t.text, torch.zeros(len(t.token_ids)), "stop")
                        for t in self._choose(prompt)
                    ),
                )
                for prompt in prompts
            ]
            scores = score_rollouts(self.tasks, rollouts)
            components = component_tensors([one for group in scores for one in group])
            rewards = self.rewards.combine(components, group_size=self.group_size)
        return RolloutBatch(
            rollout=self.rollout,
            rollouts=rollouts,
            components=components,
            rewards=rewards,
            advantages=torch.ones(len(rewards)),
            zero_variance=torch.zeros(len(prompts), dtype=torch.bool),
            seconds=seconds,
        )

    def _choose(self, prompt: Prompt) -> list[Trace]:
        """Different traces where the prompt has enough of them."""
        traces = list(self._traces[prompt.id])
        draw = random.Random(f"{self.seed}/{self.rollout}/{prompt.id}")
        draw.shuffle(traces)
        return [traces[i % len(traces)] for i in range(self.group_size)]

    def _update(self, batch: RolloutBatch) -> dict[str, float | None]:
        optimizer: Any = self.optimizers()
        update = Update(learning_rate=optimizer.param_groups[0]["lr"])
        with timed(batch.seconds, "train"):
            optimizer.zero_grad(set_to_none=True)
            update.first = update.last = self._accumulate_gradients(batch)
            update.grad_norm = self._optimizer_step()
            update.num_updates = 1
            self._tell_step_taken(
                batch,
                loss=update.last.loss,
                grad_norm=update.grad_norm,
                lr=update.learning_rate,
            )
            optimizer.zero_grad(set_to_none=True)
            self.engine.sync()
        metrics = step_metrics(
            batch, update, has_reference=False, trainable_params=self.num_trainable()
        )
        return {**metrics, "sampler_gap": None, SAMPLER_GAP_MAX: None}  # nothing was sampled

    def _accumulate_gradients(self, batch: RolloutBatch) -> Sums:
        lengths = torch.tensor([len(completion.token_ids) for completion in batch.completions])
        weights = token_weights(
            lengths,
            loss="dapo" if self.normalization == "tokens" else "grpo",  # the same denominators
            group_size=batch.group_size,
            max_completion_length=int(lengths.max()),
        ).to(self.policy.device)
        sums = Sums()
        for uncopied in training_batches(
            batch.rollouts,
            keep=torch.ones(len(lengths), dtype=torch.bool),
            max_tokens=self.max_tokens_per_microbatch,
            pad_token_id=self.policy.pad_token_id,
            can_pack=self.policy.can_pack,
        ):
            part = uncopied.to(self.policy.device)
            logprobs, entropy = self.policy.completion_logprobs(part, temperature=1.0)
            loss = -(logprobs * weights[part.rows, None]).sum()
            value = float(loss.detach())
            require_finite(value, part.rows)
            self.manual_backward(loss)
            sums.loss += value
            sums.tokens += int(part.mask.sum())
            sums.entropy += float(entropy.detach().sum())
        return sums
