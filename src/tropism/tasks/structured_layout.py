"""How the objects stand in an answer: format, top-level key, how many, in which fence."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tropism.tasks.structured_names import Names

Format = Literal["json", "yaml", "xml", "markdown"]
Fence = Literal["free", "required", "forbidden"]
FORMATS: Sequence[Format] = get_args(Format)
FENCES: Sequence[Fence] = get_args(Fence)
XML_ROOT = "answer"
"""Root element where no wrapper key is asked for; XML cannot do without."""


@dataclass(frozen=True)
class Layout:
    """What a prompt asks of an answer besides the schema of one object.

    Args:
        format: In which language.
        wrapper: The one key (root element, first heading) above all, or None.
        count: Fewest and most objects of a list; None for one object that is no list.
        fence: Whether the answer stands in a fenced code block.
        can_comment: There may be text around the fence, and comments in YAML and XML.
    """

    format: Format = "json"
    wrapper: str | None = None
    count: tuple[int, int] | None = None
    fence: Fence = "free"
    can_comment: bool = False

    @property
    def key(self) -> str | None:
        """The key above all: ``wrapper``, or the root that XML has anyhow."""
        return XML_ROOT if self.format == "xml" and self.wrapper is None else self.wrapper

    def content_schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Schema of what stands under ``key``: one object, or a list of them."""
        return schema if self.count is None else {"type": "array", "items": schema}


def draw_layout(format: Format, names: Names, draw: random.Random) -> Layout:
    """A wrapper in half of the rows, one object in 40 %, a fence required or forbidden in 60 %."""
    wrapper = draw.choice(names.wrappers) if draw.random() < 0.5 else None
    count, kind = None, draw.random()
    if kind < 0.6:
        fewest = draw.randint(2, 3)
        count = (fewest, fewest if kind < 0.35 else fewest + draw.randint(1, 2))
    fence: Fence = draw.choices(FENCES, weights=(4, 3, 3))[0]
    # Without a fence, nothing would tell an answer from what is said about it.
    can_comment = fence == "required" and draw.random() < 0.5
    return Layout(format, wrapper, count, fence, can_comment)
