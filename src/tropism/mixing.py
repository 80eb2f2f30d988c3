"""In which order prompts come: shares of the tasks, and permutations of their pools."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Literal

from tropism.types import Prompt

Curriculum = Literal["none", "easy_first", "hard_first", "mixed_first"]

CURRICULA: Mapping[Curriculum, Callable[[float], float]] = {
    "none": lambda rate: 0.0,
    "easy_first": lambda rate: -rate,
    "hard_first": lambda rate: rate,
    "mixed_first": lambda rate: abs(rate - 0.5),
}
"""What prompts are ordered by, lowest first, as a function of their pass rate in [0, 1]."""


class Epochs:
    """Draws from a pool without end: each epoch is a permutation keyed by (key, epoch)."""

    def __init__(self, pool: Sequence[Prompt], key: str) -> None:
        self._pool, self._key = pool, key
        self._epoch = count()
        self._left: list[Prompt] = []

    def draw(self, avoid: Sequence[Prompt], rollout: int) -> Prompt:
        """The next prompt, for ``rollout``.

        Where an epoch begins, those of ``avoid``, which the rollout has already, come later in it.
        """
        if not self._left:
            self._left = list(self._pool)
            random.Random(f"{self._key}/{next(self._epoch)}").shuffle(self._left)
            taken = {prompt.id for prompt in avoid}
            self._left.sort(key=lambda prompt: prompt.id not in taken)  # popped from the end
        return self._left.pop()


class OrderedEpochs(Epochs):
    """Each epoch is a permutation in the order of a curriculum, which may fade.

    Args:
        pool: The prompts.
        key: Of the ties' order and of the fade.
        rates: Prompt id -> pass rate in [0, 1].
        curriculum: The order.
        fade_rollouts: Over so many rollouts the order fades into chance; null: it never does.
    """

    def __init__(
        self,
        pool: Sequence[Prompt],
        key: str,
        *,
        rates: Mapping[str, float],
        curriculum: Curriculum,
        fade_rollouts: int | None,
    ) -> None:
        super().__init__(pool, key)
        self._rates, self._order_by = rates, CURRICULA[curriculum]
        self._fade_rollouts = fade_rollouts
        self._random = random.Random()
        self._began_in = 0  # rollout of the epoch's first prompt, which may hold some of the last

    def draw(self, avoid: Sequence[Prompt], rollout: int) -> Prompt:
        if not self._left:
            self._random = random.Random(f"{self._key}/{next(self._epoch)}")
            self._left = list(self._pool)
            self._random.shuffle(self._left)
            self._left.sort(key=lambda prompt: self._order_by(self._rates[prompt.id]))
            self._began_in = rollout
        places: Sequence[int] = range(len(self._left))
        if rollout == self._began_in:
            taken = {prompt.id for prompt in avoid}
            places = [i for i in places if self._left[i].id not in taken]
        is_in_order = self._random.random() < self._strength(rollout)
        return self._left.pop(places[0] if is_in_order else self._random.choice(places))

    def _strength(self, rollout: int) -> float:
        return 1.0 if self._fade_rollouts is None else 1.0 - rollout / self._fade_rollouts


def quota_order(shares: Mapping[str, float]) -> Iterator[str]:
    """Names without end, each as often as its share says, to within one at every point.

    The quota method of Balinski and Young (1975): of the names not yet ahead of their share, the
    one with the most share per turn comes next (the first listed of equals).
    """
    given = dict.fromkeys(shares, 0)
    for total in count(1):
        behind = [name for name, share in shares.items() if given[name] < share * total - 1e-9]
        name = max(behind, key=lambda name: shares[name] / (given[name] + 1))
        given[name] += 1
        yield name


def quota(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """How many of the first ``total`` names of ``quota_order`` are each name."""
    given = dict.fromkeys(shares, 0)
    for name in islice(quota_order(shares), total):
        given[name] += 1
    return given


def normalised_shares(names: Sequence[str], mix: Mapping[str, float] | None) -> dict[str, float]:
    mix = dict.fromkeys(names, 1.0) if mix is None else mix
    if mix.keys() != set(names):
        raise ValueError(f"mix names {sorted(mix)}, the tasks are {sorted(names)}: name each once.")
    for name, share in mix.items():
        if not (share > 0 and math.isfinite(share)):
            raise ValueError(f"mix.{name}={share}: give a share above 0.")
    total = sum(mix.values())
    return {name: mix[name] / total for name in names}
