"""Whether a completion says things again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tropism.tasks.extra import ExtraReward
from tropism.types import Completion, Prompt

Unit = Literal["token", "word", "character"]
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Repetition(ExtraReward):
    """Distinct n-grams of a completion among all its n-grams: 1 where nothing comes twice.

    This is 1 - seq-rep-n of 1908.04319. In units of tokens it needs no idea of what a word is, so
    that languages without blanks are judged like others.

    A completion of fewer than 2 n units is too short to repeat much and has 1, so that a right
    answer of one word is not below a long one; a blank one has 0. Random words have 1 too: weigh
    it little against what is wanted.

    Args:
        n: Units in an n-gram.
        unit: ``token`` (the end-of-sequence token left out), ``word`` (a run of letters and
            digits, or a sign; in any case) or ``character`` (blanks left out).
        tolerance: Share of repeated n-grams that costs nothing. Formulas and code repeat some.
        name: Of the component.

    Raises:
        ValueError: n or tolerance out of range, or an unknown unit.
    """

    n: int = 4
    unit: Unit = "token"
    tolerance: float = 0.0
    name: str = "repetition"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Repetition.n={self.n}: give at least 1.")
        if self.unit not in get_args(Unit):
            raise ValueError(f"Repetition.unit={self.unit!r}: choose from {get_args(Unit)}.")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"Repetition.tolerance={self.tolerance}: give a share in [0, 1).")

    def score(self, prompt: Prompt, completion: Completion) -> float:
        if not completion.text.strip():
            return 0.0
        units = self._units(completion)
        if len(units) < 2 * self.n:
            return 1.0
        grams = [tuple(units[i : i + self.n]) for i in range(len(units) - self.n + 1)]
        return min(1.0, len(set(grams)) / len(grams) / (1 - self.tolerance))

    def _units(self, completion: Completion) -> Sequence[int | str]:
        if self.unit == "token":
            ids = completion.token_ids
            return ids[:-1] if completion.finish_reason == "stop" else ids
        if self.unit == "word":
            return _WORD.findall(completion.text.casefold())
        return "".join(completion.text.casefold().split())
