from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ORGANISM = """
seed_everything: 0
model:
  class_path: tropism.GRPO
  init_args:
    model: {name: organism, dtype: float32}
    lora: {rank: 4, alpha: 8}
    group_size: 4
    sampling: {max_new_tokens: 12, temperature: 1.0}
    optimizer: {learning_rate: 2.0e-3}
data:
  class_path: tropism.PromptDataModule
  init_args:
    tasks: [{class_path: tropism.tasks.skills.Skills}]
    batch_size: 8
    num_rollouts: 4
    num_train_prompts: 16
    num_validation_prompts: 8
    num_test_prompts: 8
trainer:
  accelerator: cpu
"""


def _command(tmp_path: Path, name: str, config: str) -> Callable[..., Path]:
    from tropism.cli import main

    path = tmp_path / f"{name}.yaml"
    path.write_text(config)

    def run(*arguments: str, subcommand: str = "fit") -> Path:
        main([subcommand, "--config", str(path), *arguments])
        runs = (tmp_path / "runs").glob("*/version_*")
        return max(runs, key=lambda run: run.stat().st_mtime_ns)

    return run


@pytest.fixture
def tropism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``tropism(*arguments)`` runs the command in a temporary folder; gives the run folder."""
    monkeypatch.chdir(tmp_path)
    return _command(tmp_path, "tiny", ORGANISM)


@pytest.fixture
def tropism_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The same for SFT on the tasks' gold answers."""
    monkeypatch.chdir(tmp_path)
    config = ORGANISM.replace("tropism.GRPO", "tropism.SFT").replace(
        "group_size: 4", "group_size: 1"
    )
    return _command(tmp_path, "tiny_sft", config)
