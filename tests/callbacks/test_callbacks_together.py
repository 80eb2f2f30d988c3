"""All callbacks on the real module and the tiny model: a resumed run equals the whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from tropism import GRPO, PromptDataModule
from tropism.measurements import records
from tropism.models import LoRA, Model
from tropism.rollouts.engine import Sampling
from tropism.tasks.skills import Skills
from tropism_callbacks import (
    Checkpoint,
    Evaluation,
    Progress,
    RolloutSamples,
    RunRecord,
    UpdateNorms,
)

TABLES = ("steps", "rewards", "update_norms", "evals", "completions")


class FailAfter(Callback):
    def __init__(self, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if pl_module.rollout == self.num_rollouts:
            raise RuntimeError("the power went")


def fit(
    folder: Path, *extra: Callback, organism: str, ckpt_path: Path | None = None
) -> tuple[Path, GRPO]:
    L.seed_everything(0)
    module = GRPO(
        model=Model(name=organism, dtype="float32"),
        lora=LoRA(rank=4, alpha=8),
        group_size=4,
        sampling=Sampling(max_new_tokens=12),
    )
    data = PromptDataModule(
        tasks=[Skills()], batch_size=8, group_size=4, num_rollouts=3, num_validation_prompts=8
    )
    logger = TensorBoardLogger(folder.parent, name=folder.name, version="version_0")
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=logger,
        num_sanity_val_steps=-1,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[
            RunRecord(),
            Progress(),
            Evaluation(),
            UpdateNorms(heat_map_every=2),
            RolloutSamples(every_n_rollouts=1),
            Checkpoint(every_n_rollouts=1),
            *extra,
        ],
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return Path(logger.log_dir), module


def test_a_resumed_run_records_what_the_whole_run_records(tmp_path: Path, organism: str) -> None:
    whole, module = fit(tmp_path / "whole", organism=organism)
    with pytest.raises(RuntimeError, match="the power went"):
        fit(tmp_path / "resumed", FailAfter(2), organism=organism)
    # The failing callback came before Checkpoint: rollout 1 is on record, but not saved.
    last = tmp_path / "resumed" / "version_0" / "checkpoints" / "last.ckpt"
    resumed, again = fit(tmp_path / "resumed", organism=organism, ckpt_path=last)
    for table in TABLES:
        rows, expected = records.read(resumed, table), records.read(whole, table)
        timings = [column for column in rows.columns if column.startswith("seconds_")]
        assert len(expected) > 0
        assert rows.drop(columns=timings).equals(expected.drop(columns=timings)), table
    for name, parameter in module.policy.named_trainable().items():
        assert torch.equal(parameter, again.policy.named_trainable()[name])
    assert len(records.read(whole, "update_norms")) == 3 * len(module.policy.sites)
    summaries = [json.loads((f / "run.json").read_text())["summary"] for f in (whole, resumed)]
    assert summaries[0] == summaries[1]
    assert summaries[0]["evaluation"]["skills"]["base"]["n"] == 8
    assert (resumed / "adapter" / "adapter_model.safetensors").exists()
