"""The prompts of all splits of all tasks: drawn once, counted, and checked to be apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from tropism.mixing import normalised_shares, quota, quota_order
from tropism.tasks.base import Split, Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

MAX_DEFAULT_TRAIN_PROMPTS = 8192
"""Distinct training prompts where their number is not given, at most; later epochs repeat."""


class PromptSplits:
    """Draws the prompts of tasks split by split.

    Args:
        tasks: What is trained on and evaluated.
        out_of_domain_tasks: What is only evaluated.
        shares: Name of each of ``tasks`` -> its share.
        num_train: Training prompts of all tasks together; None: as many as the run needs, as there
            are, up to ``MAX_DEFAULT_TRAIN_PROMPTS``.
        num_held_out: Validation and test prompts of ``tasks`` together.
        num_out_of_domain: The same of ``out_of_domain_tasks``, in each of the two splits.
        num_rollouts: Rollout batches of the run.
        prompts_per_rollout: Prompts of one of them.
        seed: Keys which prompts are drawn.

    Attributes:
        pools: Split -> task -> its prompts, of the splits that were drawn.
        most_per_rollout: Task name -> the most of its prompts that any one rollout takes.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        out_of_domain_tasks: Sequence[Task],
        *,
        shares: Mapping[str, float],
        num_train: int | None,
        num_held_out: Mapping[Split, int],
        num_out_of_domain: int,
        num_rollouts: int,
        prompts_per_rollout: int,
        seed: int,
    ) -> None:
        self.pools: dict[Split, dict[str, list[Prompt]]] = {}
        self._tasks, self._others = tasks, out_of_domain_tasks
        self._shares, self._seed = shares, seed
        self._is_given = num_train is not None
        if num_train is None:
            needed = num_rollouts * prompts_per_rollout
            num_train = max(min(needed, MAX_DEFAULT_TRAIN_PROMPTS), prompts_per_rollout)
        self._num_train = num_train
        self._num_held_out = num_held_out
        others = normalised_shares([task.name for task in out_of_domain_tasks], None)
        self._num_others = quota(others, num_out_of_domain if others else 0)
        names = quota_order(shares)
        self.most_per_rollout: Counter[str] = Counter()
        for _ in range(num_rollouts):
            self.most_per_rollout |= Counter(islice(names, prompts_per_rollout))

    def draw(self, *, needs_test: bool) -> None:
        """Draw what is not drawn yet: training and validation prompts, and test prompts.

        Args:
            needs_test: Whether too few test prompts are an error; else there are then none.

        Raises:
            ValueError: A task has too few prompts or breaks the contract of ``Task.prompts``, or
                two splits share a prompt.
        """
        if not self.pools:
            pools: dict[Split, dict[str, list[Prompt]]] = {
                "train": self._draw_train(),
                "validation": self._draw_held_out("validation"),
            }
            _check_disjoint(pools)
            self.pools = pools
        if "test" not in self.pools:
            try:
                test = self._draw_held_out("test")
            except NotEnoughPromptsError:
                if not needs_test:
                    return
                raise
            _check_disjoint({**self.pools, "test": test})
            self.pools["test"] = test

    def _draw_train(self) -> dict[str, list[Prompt]]:
        amounts = quota(self._shares, self._num_train)
        pools = {}
        for task in self._tasks:
            try:
                pool = self._draw(task, "train", amounts[task.name])
            except NotEnoughPromptsError as error:
                if self._is_given or not error.num_available:
                    raise
                pool = self._draw(task, "train", error.num_available)
            if len(pool) < self.most_per_rollout[task.name]:
                raise ValueError(
                    f"task {task.name!r} has {len(pool)} training prompts; one rollout takes "
                    f"{self.most_per_rollout[task.name]} of it and holds none twice. Lower "
                    "batch_size, raise group_size, num_train_prompts or its share in mix, or add "
                    "prompts."
                )
            pools[task.name] = pool
        return pools

    def _draw_held_out(self, split: Split) -> dict[str, list[Prompt]]:
        amounts = {**quota(self._shares, self._num_held_out[split]), **self._num_others}
        return {
            task.name: self._draw(task, split, amounts[task.name]) if amounts[task.name] else []
            for task in (*self._tasks, *self._others)
        }

    def _draw(self, task: Task, split: Split, num: int) -> list[Prompt]:
        prompts = list(task.prompts(split, num, self._seed))
        if len(prompts) != num or not prompts:
            raise ValueError(
                f"task {task.name!r} gave {len(prompts)} prompts of split {split!r} where {num} "
                "were asked for; its data may be empty."
            )
        if strays := sorted({p.task for p in prompts} - {task.name}):
            raise ValueError(f"task {task.name!r} gave prompts of tasks {strays}.")
        return prompts


def _check_disjoint(pools: Mapping[Split, Mapping[str, Sequence[Prompt]]]) -> None:
    owner: dict[str, tuple[str, str]] = {}
    for split, of_tasks in pools.items():
        for name, pool in of_tasks.items():
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


def _text(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.messages is not None
    return json.dumps([dict(message) for message in prompt.messages], sort_keys=True)
