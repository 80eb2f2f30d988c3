"""A small stand-in for the GRPO module, so that callbacks are tested on what they are shown.

Two layers x two LoRA linears; the rewards of every rollout are written down here, and the
gradient is 1 everywhere, so that with SGD at a rate of 0.01 each update moves every factor by 0.01.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tropism.lora.plan import SitePlan
from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.rollouts.engine import Sampling
from tropism.tasks.base import Split, Task
from tropism.types import (
    Completion,
    GenerationProgress,
    Prompt,
    Rollout,
    RolloutBatch,
    ScoredCompletion,
    StepObserver,
)

NAN = float("nan")
GROUP_SIZE = 2
REWARDS = ((1.0, 0.0, 0.5, 0.5), (1.0, 1.0, 0.0, 0.0), (0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 1.0, 0.5))
"""[num_rollouts][B]: rollout 1 has only zero-variance groups, and takes no step."""


class Arithmetic(Task):
    """Prompts ``n + n``; right is the sum; the length bonus abstains on empty answers."""

    name = "arithmetic"
    components: ClassVar = ("right", "short")
    primary = "right"

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        return [
            Prompt(id=f"{split}/{i}", task=self.name, text=f"{i} + {i} =", columns={"sum": 2 * i})
            for i in range(num)
        ]

    def score(self, prompt: Prompt, completion: str) -> Mapping[str, float | None]:
        return {
            "right": float(completion == str(prompt.columns["sum"])),
            "short": 1.0 / len(completion) if completion else None,
        }

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        return {"constant": lambda prompt: "0", "echo": lambda prompt: prompt.text or ""}


@dataclass
class Adapter:
    a: nn.Parameter
    b: nn.Parameter
    scaling: float = 2.0


class Policy:
    """Base linears with or without LoRA factors."""

    def __init__(self, *, uses_lora: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        names = [f"model.layers.{i}.{m}" for i in range(2) for m in ("mlp.up_proj", "q_proj")]
        self.provenance: dict[str, str] = {}
        self.sites = name_sites(names)
        self.uses_lora = uses_lora
        self.model = nn.Module()
        self.linears = nn.ModuleList(nn.Linear(5, 3, bias=False) for _ in names)
        self.a = nn.ParameterList(nn.Parameter(torch.empty(2, 5)) for _ in names)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(3, 2)) for _ in names)
        for parameter in [*self.linears.parameters(), *self.a.parameters()]:
            nn.init.normal_(parameter, generator=generator)
        self.starting: dict[str, tuple[Tensor, Tensor]] = {}
        if uses_lora:
            self.model.a, self.model.b = self.a, self.b
        else:
            self.model.linears = self.linears
        self.exported = 0

    def adapter(self, site: LinearSite) -> Adapter | None:
        index = self.sites.index(site)
        return Adapter(self.a[index], self.b[index]) if self.uses_lora else None

    def linear(self, site: LinearSite) -> nn.Linear:
        linear = self.linears[self.sites.index(site)]
        assert isinstance(linear, nn.Linear)
        return linear

    def starting_adapter(self, site: LinearSite) -> tuple[Tensor, Tensor] | None:
        return self.starting.get(site.name)

    def export(self, run_folder: Path, *, should_merge: bool = False) -> Path:
        self.exported += 1
        (run_folder / "adapter").mkdir(exist_ok=True)
        (run_folder / "adapter" / "weights").write_text(f"export {self.exported}")
        return run_folder / "adapter"


class StandIn(L.LightningModule):
    """Follows the order of calls of ``tropism.grpo.GRPO``."""

    def __init__(self, *, uses_lora: bool = True, fail_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({"group_size": GROUP_SIZE, "seed": 7, "objective": {"beta": 0.1}})
        self.automatic_optimization = False
        self.group_size, self.sampling = GROUP_SIZE, Sampling(max_new_tokens=6)
        self.policy = Policy(uses_lora=uses_lora)
        self.network = self.policy.model
        self.tasks = self.evaluated_tasks = {"arithmetic": Arithmetic()}
        self.extra_rewards: tuple[Any, ...] = ()
        self.extra_rewards = ()
        self.rewards = SimpleNamespace(weights={"right": 1.0, "short": 0.25})
        self.placement = SimpleNamespace(entry=self._entry) if uses_lora else None
        self.gradient_shares: dict[str, float | None] = {}
        self.rollout, self.fail_at = 0, fail_at
        self.failure: BaseException = RuntimeError("the reward of row 3 raised")
        self.observers: list[StepObserver] = []

    def add_observer(self, observer: StepObserver) -> None:
        if observer not in self.observers:
            self.observers.append(observer)

    def _entry(self, site: LinearSite) -> SitePlan:
        adapter = self.policy.adapter(site)
        state = "OFF" if adapter is None else "TRAIN"
        return SitePlan(site.layer, site.module, state, 0 if adapter is None else 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.network.parameters(), lr=0.01)

    def training_step(self, batch: list[Prompt], batch_idx: int) -> None:
        if self.rollout == self.fail_at:
            raise self.failure
        for done in range(len(batch) * GROUP_SIZE + 1):
            for observer in self.observers:
                observer.generation_progress(
                    self,  # type: ignore[arg-type]
                    GenerationProgress(done, len(batch) * GROUP_SIZE, 3 * done),
                )
        scored = rollout_batch(self.rollout, prompts=batch)
        for observer in self.observers:
            observer.rollout_scored(self, scored)  # type: ignore[arg-type]
        has_signal = not bool(scored.zero_variance.all())
        if has_signal:
            for observer in self.observers:
                observer.before_update(self, scored)  # type: ignore[arg-type]
            optimizer: Any = self.optimizers()
            for parameter in self.network.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            for observer in self.observers:
                observer.step_taken(
                    self,  # type: ignore[arg-type]
                    scored,
                    {"loss": -0.5, "grad_norm": 3.0, "lr": 0.01},
                )
        metrics = {
            "tokens": 12, "loss": -0.5 if has_signal else None,
            "reward": float(scored.rewards.mean()), "reward_std": 0.25,
            "frac_reward_zero_std": float(scored.zero_variance.float().mean()), "kl": 0.004,
            "entropy": 1.5 if has_signal else None, "grad_norm": 3.0 if has_signal else None,
            "lr": 0.01, "completion_length": 3.0, "clipped_ratio": 0.25, "sampler_gap": 0.001,
            "trainable_params": 64, "num_updates": int(has_signal), "clip_ratio/low_mean": 0.125,
            "reward/batch_std": 0.5,
        }  # fmt: skip
        for observer in self.observers:
            observer.after_update(self, scored, metrics)  # type: ignore[arg-type]
        self.rollout += 1

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> list[ScoredCompletion]:
        """Right for as many prompts as rollouts are done (prompt ``i`` once ``i <= rollout``)."""
        scored = []
        for prompt in batch:
            number = int(prompt.columns["sum"]) // 2
            text = str(2 * number) if number <= self.rollout else ""
            scores = self.tasks["arithmetic"].score(prompt, text)
            scored.append(ScoredCompletion(prompt, completion(text), scores))
        return scored

    def test_step(self, batch: list[Prompt], batch_idx: int) -> list[ScoredCompletion]:
        return self.validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rollout"] = self.rollout

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rollout = checkpoint["rollout"]


def completion(text: str) -> Completion:
    return Completion(tuple(range(len(text) + 1)), text, torch.zeros(len(text) + 1), "stop")


def rollout_batch(rollout: int = 0, *, prompts: Sequence[Prompt] | None = None) -> RolloutBatch:
    """The written-down rewards of one rollout as a batch of two groups of two."""
    prompts = prompts or Arithmetic().prompts("train", 2, 0)
    rewards = torch.tensor(REWARDS[rollout])
    groups = rewards.view(-1, GROUP_SIZE)
    return RolloutBatch(
        rollout=rollout,
        rollouts=[
            Rollout(p, (1, 2), tuple(completion(f"answer {g}") for g in range(GROUP_SIZE)))
            for p in prompts
        ],
        components={"right": rewards, "short": torch.tensor([0.5, NAN, NAN, 0.25])},
        rewards=rewards,
        advantages=(groups - groups.mean(dim=1, keepdim=True)).flatten(),
        zero_variance=groups.std(dim=1) == 0,
        seconds={"rollout": 2.0, "reward": 0.5, "probe": 0.0, "train": 1.5},
    )


class Batches:
    """A resumable loader of rollout batches."""

    def __init__(self, num: int) -> None:
        prompts = Arithmetic().prompts("train", 2 * num, 0)
        self.batches = [list(prompts[2 * i : 2 * i + 2]) for i in range(num)]
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Prompt]]:
        start, self.position = self.position, 0
        for index in range(start, len(self.batches)):
            self.given = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Data(L.LightningDataModule):
    def __init__(self, num_rollouts: int = len(REWARDS), num_held_out: int = 6) -> None:
        super().__init__()
        self.num_rollouts, self.prompts_per_rollout = num_rollouts, 2
        self.group_size, self.num_held_out = GROUP_SIZE, num_held_out

    def train_dataloader(self) -> Batches:
        return Batches(self.num_rollouts)

    def val_dataloader(self) -> DataLoader[list[Prompt]]:
        prompts = list(Arithmetic().prompts("validation", self.num_held_out, 0))
        return DataLoader(prompts, batch_size=4, collate_fn=list)  # type: ignore[arg-type]

    test_dataloader = val_dataloader

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@dataclass
class Run:
    """A stand-in, a trainer that writes to a temporary folder, and what they leave there."""

    folder: Path
    module: StandIn
    trainer: L.Trainer
    data: Data = field(default_factory=Data)

    def fit(self, ckpt_path: Path | None = None) -> Run:
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=ckpt_path)
        return self


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(
        *callbacks: Callback,
        name: str = "run",
        data: Data | None = None,
        module: StandIn | None = None,
        **trainer: Any,
    ) -> Run:
        logger = TensorBoardLogger(tmp_path, name=name, version="version_0")
        settings = {"num_sanity_val_steps": -1, "enable_checkpointing": False, **trainer}
        settings.setdefault(
            "enable_progress_bar",
            any(type(callback).__name__ == "Progress" for callback in callbacks),
        )
        return Run(
            folder=Path(logger.log_dir),
            module=module or StandIn(),
            data=data or Data(),
            trainer=L.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=logger,
                callbacks=list(callbacks),
                enable_model_summary=False,
                log_every_n_steps=1,
                **settings,
            ),
        )

    return make


@pytest.fixture
def stand_in() -> type[StandIn]:
    return StandIn


@pytest.fixture
def make_batch() -> Callable[..., RolloutBatch]:
    return rollout_batch


@pytest.fixture
def data() -> type[Data]:
    return Data


@pytest.fixture
def events() -> Callable[[Path], Any]:
    """Reads the TensorBoard event files of a run folder."""

    def read(folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
        return accumulator.Reload()

    return read
