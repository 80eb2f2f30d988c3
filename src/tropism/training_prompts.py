"""Which of the drawn prompts are trained on, and in which order: contamination and difficulty."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from tropism.decontamination import ENOUGH_FOR_TEMPLATE, Decontaminate, HeldOutTexts, Leak
from tropism.difficulty import Difficulty
from tropism.mixing import Epochs, OrderedEpochs, quota_order
from tropism.tasks.base import Task
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt


class TrainingPrompts:
    """The training prompts of all tasks, which can only become fewer.

    Args:
        pools: Task name -> its prompts; changed in place.
        tasks: Gives more of a task's prompts where its template is to be learnt.
        most_per_rollout: Task name -> the most of its prompts that any one rollout takes.
        seed: Keys the order.
    """

    def __init__(
        self,
        pools: dict[str, list[Prompt]],
        tasks: Sequence[Task],
        most_per_rollout: Mapping[str, int],
        seed: int,
    ) -> None:
        self.pools = pools
        self.left_out: dict[str, Any] = {}
        self._tasks, self._most, self._seed = tasks, most_per_rollout, seed
        self._difficulty: Difficulty | None = None
        self._rates: dict[str, dict[str, float]] = {}  # of the kept prompts, by task and id

    def keep(self, ids: Mapping[str, Collection[str]], which: str, remedy: str) -> None:
        """Train on these prompts of each task alone.

        Raises:
            ValueError: Too few of a task's prompts are left for one rollout.
        """
        kept = {name: [p for p in pool if p.id in ids[name]] for name, pool in self.pools.items()}
        for name, pool in kept.items():
            if len(pool) < self._most[name]:
                raise ValueError(
                    f"task {name!r} has {len(pool)} training prompts {which}; one rollout takes "
                    f"{self._most[name]} of it and holds none twice. {remedy}"
                )
        self.pools.update(kept)

    def leaks(self, places: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Leak]]:
        """Task name -> its prompts that share text with those of ``places``."""
        held_out = HeldOutTexts(places)
        return {
            task.name: held_out.leaks(self.pools[task.name], partial(self._more_of, task))
            for task in self._tasks
        }

    def decontaminate(self, places: Mapping[str, Sequence[Prompt]], mode: Decontaminate) -> None:
        """Drop, or warn of, what shares text with the prompts of ``places``."""
        if mode == "off":
            return
        found = self.leaks(places)
        counts = self.left_out.setdefault("contaminated", dict.fromkeys(self.pools, 0))
        for name, leaks in found.items():
            counts[name] += len(leaks)
            if leaks:
                rank_zero_warn(_report(name, len(self.pools[name]), leaks, mode))
        if mode == "drop" and any(found.values()):
            leaked = {name: {leak.prompt_id for leak in leaks} for name, leaks in found.items()}
            self.keep(
                {name: {p.id for p in pool} - leaked[name] for name, pool in self.pools.items()},
                "that share no text with a held-out prompt",
                "Give other training prompts, raise num_train_prompts, lower batch_size, or keep "
                "them with decontaminate=warn.",
            )

    def select(self, difficulty: Difficulty) -> Mapping[str, Any]:
        """Keep the prompts in the band, and order them by their pass rates from now on.

        Returns:
            What the rates are of: the first line of the file.

        Raises:
            ValueError: The file does not fit, or too few prompts of a task lie in the band.
        """
        header, rates = difficulty.rates_of([p for pool in self.pools.values() for p in pool])
        self._difficulty = difficulty
        self._rates = {name: {} for name in self.pools}
        for (task, prompt_id), rate in rates.items():
            if rate is not None and difficulty.low <= rate <= difficulty.high:
                self._rates[task][prompt_id] = rate
        self.left_out["outside_band"] = {
            name: len(pool) - len(self._rates[name]) for name, pool in self.pools.items()
        }
        self.keep(
            self._rates,
            f"with a pass rate from {difficulty.low:g} to {difficulty.high:g}",
            "Widen the band, measure more prompts (num_train_prompts), or lower batch_size.",
        )
        return header

    def epochs(self, name: str) -> Epochs:
        """Draws a task's prompts without end."""
        pool, key, difficulty = self.pools[name], f"{self._seed}/{name}", self._difficulty
        if difficulty is None or difficulty.curriculum == "none":
            return Epochs(pool, key)
        return OrderedEpochs(
            pool,
            key,
            rates=self._rates[name],
            curriculum=difficulty.curriculum,
            fade_rollouts=difficulty.fade_rollouts,
        )

    def schedule(
        self, shares: Mapping[str, float], num_rollouts: int, prompts_per_rollout: int
    ) -> list[list[Prompt]]:
        """The prompts of each rollout, by the tasks' shares; no rollout has one twice."""
        names = quota_order(shares)
        drawn = {name: self.epochs(name) for name in self.pools}
        batches = []
        for rollout in range(num_rollouts):
            batch: list[Prompt] = []
            for name in islice(names, prompts_per_rollout):
                batch.append(drawn[name].draw(avoid=batch, rollout=rollout))
            batches.append(batch)
        return batches

    def identity(self) -> dict[str, Any]:
        """What the order depends on, besides the seed: a run resumes only under the same."""
        sizes = {f"num_train_prompts of {name}": len(pool) for name, pool in self.pools.items()}
        if self._difficulty is None:
            return sizes
        rates = json.dumps(self._rates, sort_keys=True).encode()
        return {
            **sizes,
            "difficulty.curriculum": self._difficulty.curriculum,
            "difficulty.fade_rollouts": self._difficulty.fade_rollouts,
            "pass rates": hashlib.sha256(rates).hexdigest()[:16],
        }

    def _more_of(self, task: Task) -> Iterable[Prompt]:
        """Training prompts of a task, enough to tell its template by, or all that there are."""
        try:
            return task.prompts("train", ENOUGH_FOR_TEMPLATE, self._seed)
        except NotEnoughPromptsError as error:
            return task.prompts("train", error.num_available, self._seed)
        except ValueError:  # a task that does not say how many it has
            return ()


def _report(name: str, num: int, leaks: Sequence[Leak], mode: Decontaminate) -> str:
    shown = "; ".join(
        f"{leak.prompt_id!r} with {leak.held_out_id!r} ({leak.place}): {leak.text!r}"
        for leak in leaks[:3]
    )
    done = "are left out" if mode == "drop" else "are trained on all the same"
    return (
        f"{len(leaks)} of {num} training prompts of task {name!r} share text with held-out prompts "
        f"and {done}: {shown}{'; ...' if len(leaks) > 3 else ''}. Set data.decontaminate to drop, "
        "warn or off."
    )
