"""Train, validation and test by a stable hash: a prompt never moves when others are added."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tropism.tasks.base import Split

HELD_OUT_FRACTIONS: Mapping[Split, float] = {"validation": 0.1, "test": 0.1}
"""Shares of the held-out splits where a task does not say otherwise; the rest is for training."""


class NotEnoughPromptsError(ValueError):
    """A task has fewer distinct prompts in a split than were asked for.

    Attributes:
        num_available: How many it has.
    """

    def __init__(self, task: str, split: str, num: int, num_available: int, remedy: str) -> None:
        super().__init__(
            f"{task}: {num} prompts of split {split!r} wanted, {num_available} distinct ones "
            f"found; ask for fewer, or {remedy}."
        )
        self.num_available = num_available


def check_split(split: str) -> None:
    """Raise ValueError unless ``split`` is the name of one."""
    if split not in ("train", "validation", "test"):
        raise ValueError(f"split={split!r}: choose from 'train', 'validation' and 'test'.")


def split_of(text: str, held_out: Mapping[Split, float] = HELD_OUT_FRACTIONS) -> Split:
    """The split that ``text`` belongs to, by its SHA-256 alone.

    Args:
        text: Whatever makes two prompts the same question.
        held_out: Share of each split other than train, in [0, 1].
    """
    position = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
    for split, fraction in held_out.items():
        if position < fraction:
            return split
        position -= fraction
    return "train"
