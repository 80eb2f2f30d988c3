"""Prompts for training and evaluation: tasks mixed by share, split, seeded, resumable.

What rollout r trains on is a pure function of the configuration and r, so that a resumed run sees
what the uninterrupted one would have seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from tropism.decontamination import Decontaminate
from tropism.difficulty import Difficulty
from tropism.mixing import normalised_shares, quota, quota_order
from tropism.rollout_loader import PromptBatches, RolloutLoader
from tropism.tasks.base import Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.training_prompts import TrainingPrompts
from tropism.types import Prompt

MAX_DEFAULT_TRAIN_PROMPTS = 8192
"""Distinct training prompts where ``num_train_prompts`` is null, at most; later epochs repeat."""


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
        self.num_train_prompts = num_train_prompts
        self.num_held_out: Mapping[Split, int] = {
            "validation": num_validation_prompts,
            "test": num_test_prompts,
        }
        self.validation_batch_size = validation_batch_size
        self.seed = seed
        self.shares = normalised_shares(names, mix)
        self._num_out_of_domain = quota(
            normalised_shares(others, None), num_out_of_domain_prompts if others else 0
        )
        self.num_workers = num_workers
        self.difficulty = difficulty
        if decontaminate not in get_args(Decontaminate):
            raise ValueError(
                f"decontaminate={decontaminate!r}: choose from {list(get_args(Decontaminate))}."
            )
        self.decontaminate = decontaminate
        self._prompts: dict[Split, dict[str, list[Prompt]]] = {}
        self._training: TrainingPrompts | None = None  # what is left of _prompts["train"]
        self._held_out_elsewhere: dict[str, Sequence[Prompt]] = {}
        self._summary: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Draw the prompts of all splits, once, and check that no two splits share any.

        Before training, choose what is trained on: nothing that is contaminated, and of the rest
        what ``difficulty`` keeps.

        Raises:
            ValueError: A task has too few prompts, or breaks the contract of ``Task.prompts``.
        """
        self._draw_all(stage)
        if stage in (None, "fit") and self._training is None:
            self._training = TrainingPrompts(
                self._prompts["train"], self.tasks, self._most_per_rollout(), self.seed
            )
            held_out = {
                f"{split} of {name}": pool
                for split, pools in self._prompts.items()
                if split != "train"
                for name, pool in pools.items()
            }
            places = {**held_out, **self._held_out_elsewhere}
            self._training.decontaminate(places, self.decontaminate)
            if self.difficulty is not None:
                self._select(self._training, self.difficulty)

    def _draw_all(self, stage: str | None) -> None:
        if not self._prompts:
            prompts: dict[Split, dict[str, list[Prompt]]] = {
                "train": self._draw_train(),
                "validation": self._draw_held_out("validation"),
            }
            self._check_disjoint(prompts)
            self._prompts = prompts
        if "test" not in self._prompts:
            try:
                test = self._draw_held_out("test")
            except NotEnoughPromptsError:
                if stage in ("fit", "validate"):  # which need none
                    return
                raise
            self._check_disjoint({**self._prompts, "test": test})
            self._prompts["test"] = test

    def train_dataloader(self) -> RolloutLoader:
        """Exactly ``num_rollouts`` batches of ``prompts_per_rollout`` prompts."""
        return RolloutLoader(
            self.schedule(),
            identity={
                "seed": self.seed,
                "prompts_per_rollout": self.prompts_per_rollout,
                "mix": self.shares,
                **self._chosen().identity(),
            },
            num_workers=self.num_workers,
            num_processed=self._num_processed,
        )

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
            for pools in self._prompts.values()
            for prompts in pools.values()
            for prompt in prompts
        ]

    def held_out_prompts(self, split: Split) -> dict[str, list[Prompt]]:
        """Task name -> its prompts in validation or test; the out-of-domain tasks come last."""
        return {name: list(pool) for name, pool in self._prompts[split].items()}

    def training_prompts(self) -> list[Prompt]:
        """Every distinct training prompt."""
        return [prompt for pool in self._prompts["train"].values() for prompt in pool]

    def keep_training_prompts(self, ids: Collection[str]) -> None:
        """Train on these prompts alone; before the first batch.

        Raises:
            ValueError: Too few of a task's prompts are left for one rollout.
        """
        self._chosen().keep(
            dict.fromkeys(self._prompts["train"], ids),
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

    def summary(self) -> dict[str, Any]:
        """For ``run.json``: how many prompts are trained on, how many were left out and why."""
        return {
            "training_prompts": {
                "decontaminate": self.decontaminate,
                **self._chosen().left_out,
                **self._summary,
                "kept": {name: len(pool) for name, pool in self._prompts["train"].items()},
            }
        }

    def schedule(self) -> list[list[Prompt]]:
        """The prompts of rollouts 0 to ``num_rollouts`` - 1; no rollout has a prompt twice."""
        names = quota_order(self.shares)
        drawn = {name: self._chosen().epochs(name) for name in self._prompts["train"]}
        batches = []
        for rollout in range(self.num_rollouts):
            batch: list[Prompt] = []
            for name in islice(names, self.prompts_per_rollout):
                batch.append(drawn[name].draw(avoid=batch, rollout=rollout))
            batches.append(batch)
        return batches

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Prompts are text: they stay as they are."""
        return batch

    # -- choosing -----------------------------------------------------------------------------

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
        settings = getattr(module, "model_settings", None)
        for setting in () if settings is None else ("name", "revision", "adapter"):
            then, now = header["model"][setting], getattr(settings, setting)
            if then != now:
                rank_zero_warn(
                    f"data.difficulty: the pass rates are of model.{setting}={then!r}, and the run "
                    f"starts from {now!r}; what is easy for one may be hard for the other."
                )

    # -- drawing ------------------------------------------------------------------------------

    def _draw_train(self) -> dict[str, list[Prompt]]:
        wanted = self.num_train_prompts
        if wanted is None:
            needed = self.num_rollouts * self.prompts_per_rollout
            wanted = max(min(needed, MAX_DEFAULT_TRAIN_PROMPTS), self.prompts_per_rollout)
        amounts = quota(self.shares, wanted)
        most = self._most_per_rollout()
        pools = {}
        for task in self.tasks:
            try:
                pool = self._draw(task, "train", amounts[task.name])
            except NotEnoughPromptsError as error:
                if self.num_train_prompts is not None or not error.num_available:
                    raise
                pool = self._draw(task, "train", error.num_available)
            if len(pool) < most[task.name]:
                raise ValueError(
                    f"task {task.name!r} has {len(pool)} training prompts; one rollout takes "
                    f"{most[task.name]} of it and holds none twice. Lower batch_size, raise "
                    "group_size, num_train_prompts or its share in mix, or add prompts."
                )
            pools[task.name] = pool
        return pools

    def _most_per_rollout(self) -> Counter[str]:
        """Task name -> the most of its prompts that any one rollout takes."""
        names = quota_order(self.shares)
        most: Counter[str] = Counter()
        for _ in range(self.num_rollouts):
            most |= Counter(islice(names, self.prompts_per_rollout))
        return most

    def _draw_held_out(self, split: Split) -> dict[str, list[Prompt]]:
        amounts = {**quota(self.shares, self.num_held_out[split]), **self._num_out_of_domain}
        return {
            task.name: self._draw(task, split, amounts[task.name]) if amounts[task.name] else []
            for task in (*self.tasks, *self.out_of_domain_tasks)
        }

    def _draw(self, task: Task, split: Split, num: int) -> list[Prompt]:
        prompts = list(task.prompts(split, num, self.seed))
        if len(prompts) != num or not prompts:
            raise ValueError(
                f"task {task.name!r} gave {len(prompts)} prompts of split {split!r} where {num} "
                "were asked for; its data may be empty."
            )
        if strays := sorted({p.task for p in prompts} - {task.name}):
            raise ValueError(f"task {task.name!r} gave prompts of tasks {strays}.")
        return prompts

    @staticmethod
    def _check_disjoint(prompts: Mapping[Split, Mapping[str, Sequence[Prompt]]]) -> None:
        owner: dict[str, tuple[str, str]] = {}
        for split, pools in prompts.items():
            for name, pool in pools.items():
                for prompt in pool:
                    for key in (f"id {prompt.id}", _text(prompt)):
                        first = owner.setdefault(key, (split, name))
                        if first[0] != split:
                            raise ValueError(
                                f"prompt {prompt.id!r} of split {split!r}, task {name!r}, is in "
                                f"split {first[0]!r} of task {first[1]!r} too: {key[:200]!r}. "
                                "Held-out prompts must not be trained on; take it out of one."
                            )
                if len({prompt.id for prompt in pool}) != len(pool):
                    raise ValueError(f"task {name!r} gave a prompt id twice in split {split!r}.")

    def _batches(self, split: Split) -> PromptBatches | list[Any]:
        prompts = [prompt for pool in self._prompts[split].values() for prompt in pool]
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
        below = batch_size // group_size * group_size
        nearest = [size for size in (below, below + group_size) if size >= group_size]
        if len(nearest) == 1:
            nearest.append(nearest[0] + group_size)
        raise ValueError(
            f"batch_size={batch_size} completions are not whole groups of group_size="
            f"{group_size}; the nearest that are: {nearest[0]} or {nearest[1]}."
        )


def _text(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.messages is not None
    return json.dumps([dict(message) for message in prompt.messages], sort_keys=True)
