"""A tiny config beside a sweep file, and experiments/ on the path, as for a script in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
TINY = """
model:
  class_path: tropism.GRPO
  init_args:
    model: {name: organism, dtype: float32}
    lora: {rank: 4, alpha: 8}
    group_size: 4
    sampling: {max_new_tokens: 8, temperature: 1.0}
    optimizer: {learning_rate: 2.0e-3}
data:
  class_path: tropism.PromptDataModule
  init_args:
    tasks: [{class_path: tropism.tasks.skills.Skills}]
    batch_size: 8
    num_rollouts: 6
    num_train_prompts: 16
    num_validation_prompts: 8
trainer:
  accelerator: cpu
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 2}
"""
WriteSweep = Callable[..., Path]


@pytest.fixture(autouse=True)
def experiments_are_importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write_sweep(tmp_path: Path) -> WriteSweep:
    """Writes study/sweep.yaml beside tiny.yaml; keyword arguments are its keys, None for absent."""

    def write(**content) -> Path:
        folder = tmp_path / "study"
        folder.mkdir(exist_ok=True)
        (folder / "tiny.yaml").write_text(TINY)
        whole = {"name": "study", "question": "Does it?", "seeds": [0, 1], **content}
        kept = {key: value for key, value in whole.items() if value is not None}
        (folder / "sweep.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
        return folder / "sweep.yaml"

    return write
