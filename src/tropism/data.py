"""Prompts for training and evaluation: tasks mixed by share, split, seeded, resumable.

What rollout r trains on is a pure function of the configuration and r, so that a resumed run sees
what the uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from tropism.decontamination import Decontaminate, Leak
from tropism.difficulty import Difficulty, warn_of_another_model
from tropism.mixing import normalised_shares
from tropism.prompt_splits import PromptSplits
from tropism.rollout_loader import PromptBatches, RolloutLoader
from tropism.tasks.base import Split, Task
from tropism.training_prompts import TrainingPrompts
from tropism.types import Prompt


class PromptDataModule(L.LightningDataModule):
    """Batches of prompts out of one or more tasks.

    Args:
        tasks: Where prompts come from and who judges the answers; names must differ.
        batch_size: B, completions per rollout batch.
        group_size: G, completions per prompt (the CLI takes it from the model).
        num_rollouts: Rollout batches of one training run.
        num_train_prompts: Distinct training prompts of all tasks together; each epoch over them
            is a new permutation. Null: as many as the run needs, as there are, up to 8192.
        num_validation_prompts: Held-out prompts of all tasks together; 0 for none.
        num_test_prompts: The same for the test split.
        validation_batch_size: Prompts (one completion each) per validation or test batch.
        seed: Keys which prompts are drawn and their order.
        mix: Task name -> share of the prompts; equal shares where null. Counts follow the shares
            exactly, to within one prompt at any point of the run.
        num_workers: Processes that hand out batches; 0 is right, as prompts are made in advance.
        out_of_domain_tasks: Evaluated beside ``tasks`` at every validation and test and never
            trained on: what training does to them. Reward weights know nothing of them.
        num_out_of_domain_prompts: Held-out prompts of all of these together, in equal shares; as
            many in validation as in test.
        difficulty: Which prompts are trained on and in which order, by the pass rates of the
            starting policy; null: all of them, in an order by chance.
        decontaminate: What happens to training prompts that share text with a held-out prompt
            (``tropism.decontamination``): ``drop`` them, only ``warn``, or ``off``.

    Raises:
        ValueError: A setting that cannot work; the message names it and what would.
    """

    def __init__(
        self,
        tasks: list[Task],
        batch_size: int,
        group_size: int,
        num_rollouts: int,
        *,
        num_train_prompts: int | None = None,
        num_validation_prompts: int = 128,
        num_test_prompts: int = 128,
        validation_batch_size: int = 64,
        seed: int = 0,
        mix: Mapping[str, float] | None = None,
        num_workers: int = 0,
        out_of_domain_tasks: list[Task] | None = None,
        num_out_of_domain_prompts: int = 128,
        difficulty: Difficulty | None = None,
        decontaminate: Decontaminate = "drop",
    ) -> None:
        super().__init__()
        _check_batch(batch_size, group_size)
        self.tasks, self.out_of_domain_tasks = list(tasks), list(out_of_domain_tasks or ())
        for setting, value, least in (
            ("num_rollouts", num_rollouts, 1),
            ("num_validation_prompts", num_validation_prompts, 0),
            ("num_test_prompts", num_test_prompts, 0),
            ("num_out_of_domain_prompts", num_out_of_domain_prompts, len(self.out_of_domain_tasks)),
            ("validation_batch_size", validation_batch_size, 1),
        ):
            if value < least:
                raise ValueError(f"{setting}={value}: give at least {least}.")
        names = [task.name for task in self.tasks]
        others = [task.name for task in self.out_of_domain_tasks]
        if not names:
            raise ValueError("tasks=[]: give at least one task.")
        if len({*names, *others}) != len(names) + len(others):
            raise ValueError(f"tasks are called {names + others}: give each another `name`.")
        self.batch_size, self.group_size = batch_size, group_size
        self.prompts_per_rollout = batch_size // group_size
        self.num_rollouts = num_rollouts
        if num_train_prompts is not None and num_train_prompts < self.prompts_per_rollout:
            raise ValueError(
                f"num_train_prompts={num_train_prompts}: give at least the "
                f"{self.prompts_per_rollout} prompts of one rollout (batch_size / group_size)."
            )
        self.validation_batch_size = validation_batch_size
        self.seed = seed
        self.shares = normalised_shares(names, mix)
        self.num_workers = num_workers
        self.difficulty = difficulty
        if decontaminate not in get_args(Decontaminate):
            raise ValueError(
                f"decontaminate={decontaminate!r}: choose from {list(get_args(Decontaminate))}."
            )
        self.decontaminate = decontaminate
        self._splits = PromptSplits(
            self.tasks,
            self.out_of_domain_tasks,
            shares=self.shares,
            num_train=num_train_prompts,
            num_held_out={"validation": num_validation_prompts, "test": num_test_prompts},
            num_out_of_domain=num_out_of_domain_prompts,
            num_rollouts=num_rollouts,
            prompts_per_rollout=self.prompts_per_rollout,
            seed=seed,
        )
        self._training: TrainingPrompts | None = None
        self._batches_of_rollouts: list[list[Prompt]] = []
        self._held_out_elsewhere: dict[str, Sequence[Prompt]] = {}
        self._summary: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Draw the prompts of all splits, once, and check that no two splits share any.

        Before training, choose what is trained on: nothing that is contaminated, and of the rest
        what ``difficulty`` keeps.

        Raises:
            ValueError: A task has too few prompts, or breaks the contract of ``Task.prompts``.
        """
        # Training and validation need no test prompts.
        self._splits.draw(needs_test=stage not in ("fit", "validate"))
        if stage in (None, "fit") and self._training is None:
            self._training = self._all_training()
            held_out = {
                f"{split} of {name}": pool
                for split, pools in self._splits.pools.items()
                if split != "train"
                for name, pool in pools.items()
            }
            places = {**held_out, **self._held_out_elsewhere}
            self._training.decontaminate(places, self.decontaminate)
            if self.difficulty is not None:
                self._select(self._training, self.difficulty)

    def train_dataloader(self) -> RolloutLoader:
        """Exactly ``num_rollouts`` batches of ``prompts_per_rollout`` prompts."""
        self._batches_of_rollouts = self.schedule()
        return RolloutLoader(
            self._batches_of_rollouts,
            identity={
                "seed": self.seed,
                "prompts_per_rollout": self.prompts_per_rollout,
                "mix": self.shares,
                **self._chosen().identity(),
            },
            num_workers=self.num_workers,
            num_processed=self._num_processed,
        )

    def prompts_of(self, rollout: int) -> list[Prompt]:
        """What ``train_dataloader`` hands out for one rollout, ahead of its turn."""
        return self._batches_of_rollouts[rollout]

    def val_dataloader(self) -> PromptBatches | list[Any]:
        """The same prompts in the same order every time."""
        return self._batches("validation")

    def test_dataloader(self) -> PromptBatches | list[Any]:
        """The same prompts in the same order every time."""
        return self._batches("test")

    def all_prompts(self) -> list[Prompt]:
        """Every prompt of every split that was drawn, once each."""
        return [
            prompt
            for pools in self._splits.pools.values()
            for prompts in pools.values()
            for prompt in prompts
        ]

    def held_out_prompts(self, split: Split) -> dict[str, list[Prompt]]:
        """Task name -> its prompts in validation or test; the out-of-domain tasks come last."""
        return {name: list(pool) for name, pool in self._splits.pools[split].items()}

    def training_prompts(self) -> list[Prompt]:
        """Every distinct training prompt."""
        return [prompt for pool in self._splits.pools["train"].values() for prompt in pool]

    def keep_training_prompts(self, ids: Collection[str]) -> None:
        """Train on these prompts alone; before the first batch.

        Raises:
            ValueError: Too few of a task's prompts are left for one rollout.
        """
        self._chosen().keep(
            dict.fromkeys(self._splits.pools["train"], ids),
            "with a trace",
            "Raise num_train_prompts, give more traces, or lower batch_size.",
        )

    def hold_out(self, places: Mapping[str, Sequence[Prompt]]) -> None:
        """Treat these prompts as held out too: none that shares text with one is trained on.

        For benchmarks that are asked later. Before the first batch; before ``setup`` too, and what
        is known then counts when prompts are chosen.

        Args:
            places: How they are called in the warning -> prompts.

        Raises:
            ValueError: Too few of a task's prompts are left for one rollout.
        """
        if self._training is None:
            self._held_out_elsewhere.update(places)
        else:
            self._training.decontaminate(places, self.decontaminate)

    def overlap(self, places: Mapping[str, Sequence[Prompt]]) -> dict[str, dict[str, list[Leak]]]:
        """Place -> task -> its training prompts that share text with that place; drops none.

        Args:
            places: Benchmarks, say -> their prompts.
        """
        training = self._training or self._all_training()
        return {name: training.leaks({name: prompts}) for name, prompts in places.items()}

    def summary(self) -> dict[str, Any]:
        """For ``run.json``: how many prompts are trained on, how many were left out and why."""
        return {
            "training_prompts": {
                "decontaminate": self.decontaminate,
                **self._chosen().left_out,
                **self._summary,
                "kept": {name: len(pool) for name, pool in self._splits.pools["train"].items()},
            }
        }

    def schedule(self) -> list[list[Prompt]]:
        """The prompts of rollouts 0 to ``num_rollouts`` - 1; no rollout has a prompt twice."""
        return self._chosen().schedule(self.shares, self.num_rollouts, self.prompts_per_rollout)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Prompts are text: they stay as they are."""
        return batch

    # -- choosing -----------------------------------------------------------------------------

    def _all_training(self) -> TrainingPrompts:
        """The training prompts, before any is left out."""
        return TrainingPrompts(
            self._splits.pools["train"], self.tasks, self._splits.most_per_rollout, self.seed
        )

    def _chosen(self) -> TrainingPrompts:
        assert self._training is not None, "setup('fit') comes first"
        return self._training

    def _select(self, training: TrainingPrompts, difficulty: Difficulty) -> None:
        header = training.select(difficulty)
        self._summary["difficulty"] = {
            "file": difficulty.file,
            **{key: header[key] for key in ("model", "sampling", "num_samples")},
        }
        module = None if self.trainer is None else self.trainer.lightning_module
        warn_of_another_model(header, getattr(module, "model_settings", None))

    def _batches(self, split: Split) -> PromptBatches | list[Any]:
        prompts = [prompt for pool in self._splits.pools[split].values() for prompt in pool]
        return PromptBatches(prompts, self.validation_batch_size) if prompts else []

    def _num_processed(self) -> int | None:
        trainer = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        return int(progress.processed)


def _check_batch(batch_size: int, group_size: int) -> None:
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: give at least 1 (GRPO needs 2).")
    if batch_size < 1 or batch_size % group_size:
        below = max(batch_size, 0) // group_size * group_size
        nearest = [size for size in (below, below + group_size) if size >= group_size]
        if len(nearest) == 1:
            nearest.append(nearest[0] + group_size)
        raise ValueError(
            f"batch_size={batch_size} completions are not whole groups of group_size="
            f"{group_size}; the nearest that are: {nearest[0]} or {nearest[1]}."
        )
