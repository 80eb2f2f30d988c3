"""In which order prompts come: shares of the tasks, and permutations of their pools."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice

from tropism.types import Prompt


class Epochs:
    """Draws from a pool without end: each epoch is a permutation keyed by (key, epoch)."""

    def __init__(self, pool: Sequence[Prompt], key: str) -> None:
        self._pool, self._key = pool, key
        self._epoch = count()
        self._left: list[Prompt] = []

    def draw(self, avoid: Sequence[Prompt]) -> Prompt:
        """The next prompt; where an epoch begins, those of ``avoid`` come later in it."""
        if not self._left:
            self._left = list(self._pool)
            random.Random(f"{self._key}/{next(self._epoch)}").shuffle(self._left)
            taken = {prompt.id for prompt in avoid}
            self._left.sort(key=lambda prompt: prompt.id not in taken)  # popped from the end
        return self._left.pop()


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
