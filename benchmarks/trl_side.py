"""TRL's side: its own ``GRPOTrainer``, with only the clock and the forced lengths put in.

    python benchmarks/trl_side.py REQUEST.json RESULT.json         (against_trl.py writes and reads)

Options of the request: ``batch_size`` (``per_device_train_batch_size``; the rest of the rollout
is gradient accumulation) and ``bf16`` (autocast).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl_alone  # noqa: F401  before anything of trl.trainer
from torch import Tensor
from workload import (
    ALPHA,
    CLIP,
    LEARNING_RATE,
    MODULES,
    NUM_WARMUP_STEPS,
    RANK,
    Workload,
    linear_sizes,
    peak_megabytes,
    read_request,
    reward_of,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer


def untyped(value: Any) -> Any:
    """For attributes that TRL's and PEFT's annotations do not know of."""
    return value


class ForcedLengths(LogitsProcessor):
    """No EOS before a row's length, and nothing else at it.

    Args:
        lengths: [B] tokens of each completion, EOS included.
        eos_token_ids: All that end a completion.
        prompt_width: Tokens before the first completion token, pads included.
    """

    def __init__(
        self, lengths: Sequence[int], eos_token_ids: Sequence[int], prompt_width: int
    ) -> None:
        self.lengths = torch.tensor(lengths)
        self.eos_token_ids = list(eos_token_ids)
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.eos_token_ids] = -torch.inf
        ending = self.lengths == input_ids.shape[1] - self.prompt_width + 1
        if ending.any():
            scores[ending] = -torch.inf
            scores[ending, self.eos_token_ids[0]] = 0.0
        return scores


class ClockedTrainer(GRPOTrainer):
    """Takes the time of generation and rewards; checks what was generated."""

    def watch(self, lengths: Sequence[int]) -> None:
        """Force these lengths from now on."""
        self.forced = list(lengths)
        self.phases = {"rollout": 0.0, "reward": 0.0}
        self.prompt_token_ids: list[list[int]] = []
        base = untyped(self.model).get_base_model()
        generate = base.generate

        def generate_forced(**inputs: Any) -> Any:
            width = inputs["input_ids"].shape[1]
            force = ForcedLengths(self.forced, self.eos_token_ids, width)
            return generate(**inputs, logits_processor=LogitsProcessorList([force]))

        base.generate = generate_forced

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        made = super()._generate(prompts)
        self.phases["rollout"] += time.perf_counter() - start
        prompt_ids, completion_ids = made[0], made[1]
        found = [len(ids) for ids in completion_ids]
        if found != self.forced:
            raise RuntimeError(f"completions have {found} tokens, not {self.forced}.")
        self.prompt_token_ids = sorted(list(ids) for ids in {tuple(ids) for ids in prompt_ids})
        return made

    def _calculate_rewards(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        rewards = super()._calculate_rewards(*arguments)
        self.phases["reward"] += time.perf_counter() - start
        groups = rewards.view(-1, self.num_generations)
        if not bool((groups.std(dim=1) > 0).all()):
            raise RuntimeError(f"a group without signal would be cheaper: {rewards}.")
        return rewards


class Clock(TrainerCallback):
    """Wall time of whole steps, from one end of a step to the next."""

    def __init__(self, phases: dict[str, float]) -> None:
        self.phases = phases
        self.last: float | None = None
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        if self.last is not None:
            step = now - self.last
            rest = step - sum(self.phases.values())
            self.steps.append({**self.phases, "train": rest, "step": step})
        self.phases.update(rollout=0.0, reward=0.0)
        self.last = time.perf_counter()


def rewards(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [reward_of(completion) for completion in completions]


def build(
    workload: Workload, output: str, *, batch_size: int, bf16: bool, dtype: str = "bfloat16"
) -> ClockedTrainer:
    """The trainer, ready for ``train``.

    Raises:
        ValueError: ``batch_size`` does not divide the rows of the rollout.
    """
    if workload.num_rows % batch_size:
        raise ValueError(
            f"{workload.num_rows} completions cannot be cut into micro-batches of {batch_size}; "
            "let prompts x group size be a multiple of it."
        )
    tokenizer = AutoTokenizer.from_pretrained(workload.folder, padding_side="left")
    num_steps = workload.steps + NUM_WARMUP_STEPS
    disable_progress_bars()
    return ClockedTrainer(
        model=workload.folder,
        reward_funcs=rewards,
        args=GRPOConfig(
            output_dir=output,
            model_init_kwargs={"dtype": dtype},
            use_cpu=True,
            bf16=bf16,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=workload.num_rows // batch_size,
            num_generations=workload.group_size,
            max_completion_length=workload.max_new_tokens,
            max_steps=num_steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="dapo",
            beta=0.0,
            epsilon=CLIP,
            num_iterations=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            gradient_checkpointing=False,
            use_bias_correction_kl=False,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            log_completions=False,
            logging_steps=num_steps + 1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": workload.prompts(tokenizer) * num_steps}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(MODULES),
            layers_to_transform=None if workload.layers == "all" else workload.adapted_layers(),
            task_type="CAUSAL_LM",
        ),
    )


def run(workload: Workload, *, batch_size: int, bf16: bool) -> dict[str, Any]:
    """Seconds of the timed steps, and what they were steps of."""
    with tempfile.TemporaryDirectory() as output:
        trainer = build(workload, output, batch_size=batch_size, bf16=bf16)
        trainer.watch(workload.lengths)
        clock = Clock(trainer.phases)
        trainer.add_callback(clock)
        trainer.train()
    model = untyped(trainer.model)
    return {
        "steps": clock.steps[NUM_WARMUP_STEPS - 1 :],
        "megabytes": peak_megabytes(),
        "threads": torch.get_num_threads(),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "layers": workload.adapted_layers(),
        "linear_sizes": linear_sizes(model.get_base_model()),
        "prompt_token_ids": trainer.prompt_token_ids,
        "lengths": trainer.forced,
    }


if __name__ == "__main__":
    requested, options = read_request(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(run(requested, **options)), encoding="utf-8")
