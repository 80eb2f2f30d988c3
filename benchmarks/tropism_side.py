"""Tropism's side: the GRPO module under Lightning, as ``tropism fit`` runs it.

    python benchmarks/tropism_side.py REQUEST.json RESULT.json     (against_trl.py writes and reads)

Trainer settings are the CLI's, without logger, evaluation and callbacks (all of which measure or
record); everything else is at its default, ``max_tokens_per_microbatch`` included. Base weights
are bf16, adapters fp32 masters.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from workload import (
    ALPHA,
    CLIP,
    LEARNING_RATE,
    NUM_WARMUP_STEPS,
    RANK,
    Workload,
    linear_sizes,
    peak_megabytes,
    read_request,
    reward_of,
)

from tropism.cli import TRAINER_DEFAULTS
from tropism.data import PromptDataModule
from tropism.grpo import GRPO
from tropism.models import LoRA, Model
from tropism.objective.settings import Objective
from tropism.optimization import AdamW
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.base import Scores, Split, Task
from tropism.types import Prompt, RolloutBatch, StepObserver

OBJECTIVE = Objective(loss="dapo", clip_low=CLIP, clip_high=CLIP, beta=0.0, num_iterations=1)


class ForcedLengths(TransformersEngine):
    """The engine of every run, told where completions end."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths = torch.tensor(lengths)

    def ends(self, tokens: Tensor, rows: Tensor, position: int) -> Tensor:
        return self.lengths.to(rows.device)[rows] == position + 1


class Texts(Task):
    """Given texts as raw prompts, and a reward that differs from completion to completion."""

    name = "texts"
    components = ("number",)
    primary = "number"

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [
            Prompt(id=f"{split}-{i}", task=self.name, text=text)
            for i, text in enumerate(self.texts[:num])
        ]

    def score(self, prompt: Prompt, completion: str) -> Scores:
        return {"number": reward_of(completion)}


class Clock(StepObserver):
    """Wall time of whole steps, from one end of a step to the next, and of their phases."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.last: float | None = None
        self.steps: list[dict[str, float]] = []
        self.prompt_token_ids: list[list[int]] = []

    def after_update(
        self, module: Any, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        now = time.perf_counter()
        if self.last is not None:
            phases = {name: batch.seconds[name] for name in ("rollout", "reward")}
            step = now - self.last
            self.steps.append({**phases, "train": step - sum(phases.values()), "step": step})
        found = [len(completion.token_ids) for completion in batch.completions]
        if found != self.lengths:
            raise RuntimeError(f"completions have {found} tokens, not {self.lengths}.")
        if not bool((batch.advantages != 0).all()):
            raise RuntimeError(f"rows without advantage would be skipped: {batch.advantages}.")
        self.prompt_token_ids = sorted(list(r.prompt_token_ids) for r in batch.rollouts)
        self.last = time.perf_counter()


def run(workload: Workload) -> dict[str, Any]:
    """Seconds of the timed steps, and what they were steps of."""
    from transformers import AutoTokenizer

    texts = workload.prompts(AutoTokenizer.from_pretrained(workload.folder))
    L.seed_everything(0, verbose=False)
    module = GRPO(
        model=Model(name=workload.folder, dtype="bfloat16"),
        lora=LoRA(rank=RANK, alpha=ALPHA, layers=tuple(workload.adapted_layers())),
        group_size=workload.group_size,
        sampling=Sampling(max_new_tokens=workload.max_new_tokens, temperature=1.0),
        objective=OBJECTIVE,
        optimizer=AdamW(learning_rate=LEARNING_RATE),
        engine=ForcedLengths(workload.lengths),
    )
    data = PromptDataModule(
        [Texts(texts)],
        batch_size=workload.num_rows,
        group_size=workload.group_size,
        num_rollouts=workload.steps + NUM_WARMUP_STEPS,
        num_train_prompts=workload.num_prompts,
        num_validation_prompts=0,
        num_test_prompts=0,
    )
    clock = Clock(workload.lengths)
    module.add_observer(clock)
    defaults = {name.removeprefix("trainer."): value for name, value in TRAINER_DEFAULTS.items()}
    trainer = L.Trainer(
        **{**defaults, "callbacks": []},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    warnings.filterwarnings("ignore", module="lightning")  # advice for loaders, loggers, workers
    trainer.fit(module, datamodule=data)
    return {
        "steps": clock.steps[NUM_WARMUP_STEPS - 1 :],
        "megabytes": peak_megabytes(),
        "threads": torch.get_num_threads(),
        "trainable": module.num_trainable(),
        "layers": workload.adapted_layers(),
        "linear_sizes": linear_sizes(module.policy.base),
        "prompt_token_ids": clock.prompt_token_ids,
        "lengths": clock.lengths,
    }


if __name__ == "__main__":
    requested, _ = read_request(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(run(requested)), encoding="utf-8")
