"""How long a completion is: toward a range of tokens, or away from the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import torch

from tropism.objective.length import soft_overlong
from tropism.tasks.extra import ExtraReward
from tropism.types import Completion, Prompt

if TYPE_CHECKING:
    from torch import Tensor

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True)
class Length(ExtraReward):
    """1 within a range of tokens, falling to 0 on either side of it.

    With d the distance from the range in units of ``falloff``, at most 1: ``linear`` gives 1 - d,
    ``cosine`` (1 + cos(pi d)) / 2, which is flat near the range and near 0.

    Completions that are blank, or that were cut at the limit, give 0: the one has nothing of the
    length that it has, the other would have been longer.

    Args:
        minimum: Fewest tokens of the range, the end-of-sequence token included.
        maximum: Most tokens of the range.
        falloff: Tokens outside of the range from which on the value is 0.
        shape: Of the fall.
        name: Of the component.

    Raises:
        ValueError: A range that is none, no falloff, an unknown shape; from ``prepare``, a range
            that the completion limit does not let any completion reach.
    """

    minimum: int
    maximum: int
    falloff: int
    shape: Shape = "cosine"
    name: str = "length"

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"Length.minimum={self.minimum}, Length.maximum={self.maximum}: give a range of "
                "at least 1 token."
            )
        if self.falloff < 1:
            raise ValueError(f"Length.falloff={self.falloff}: give at least 1 token.")
        if self.shape not in get_args(Shape):
            raise ValueError(f"Length.shape={self.shape!r}: choose from {get_args(Shape)}.")

    def prepare(self, *, max_new_tokens: int, device: torch.device) -> None:
        if self.minimum > max_new_tokens:
            raise ValueError(
                f"Length.minimum={self.minimum} with sampling.max_new_tokens={max_new_tokens}: no "
                "completion can be that long; lower the one or raise the other."
            )

    def score(self, prompt: Prompt, completion: Completion) -> float:
        if completion.finish_reason == "length" or not completion.text.strip():
            return 0.0
        length = len(completion.token_ids)
        outside = max(self.minimum - length, length - self.maximum, 0)
        distance = min(outside / self.falloff, 1.0)
        return 1 - distance if self.shape == "linear" else (1 + math.cos(math.pi * distance)) / 2


@dataclass
class SoftOverlong(ExtraReward):
    """DAPO's soft overlong punishment (2503.14476, eq. 13) plus 1, as a component.

    1 up to ``buffer`` tokens before the completion limit, then linearly down to 0 at the limit. At
    a weight of 1 the advantages are those of ``objective.overlong_buffer``, which is added to the
    reward unweighted and unrecorded; a run with both is refused.

    Args:
        buffer: Tokens before the limit over which the value falls.
        name: Of the component.

    Raises:
        ValueError: No buffer; from ``prepare``, one that is longer than the limit.
    """

    buffer: int
    name: str = "soft_overlong"
    _limit: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise ValueError(f"SoftOverlong.buffer={self.buffer}: give at least 1 token.")

    def prepare(self, *, max_new_tokens: int, device: torch.device) -> None:
        if self.buffer > max_new_tokens:
            raise ValueError(
                f"SoftOverlong.buffer={self.buffer} with sampling.max_new_tokens={max_new_tokens}: "
                "every completion would be punished; give less than the limit."
            )
        self._limit = max_new_tokens

    def score(self, prompt: Prompt, completion: Completion) -> float:
        assert self._limit is not None, "prepare() tells the completion limit"
        lengths: Tensor = torch.tensor([len(completion.token_ids)])
        punishment = soft_overlong(lengths, max_completion_length=self._limit, buffer=self.buffer)
        return 1.0 + float(punishment)
