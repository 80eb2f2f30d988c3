"""Form by tags, for tasks whose prompts do not have it from ``PromptFormat(style='tags')``.

The task must ask for the tags (in its system message, say) and judge an answer that has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tropism.tasks.extra import ExtraReward
from tropism.tasks.tags import check_blocks, has_form, share_of_tags
from tropism.types import Completion, Prompt


@dataclass(frozen=True)
class Format(ExtraReward):
    """1 where the completion is these blocks and nothing else, in order, none of them blank.

    Each tag stands there exactly once, on a line of its own.

    Args:
        blocks: Names of the tags: ``("think", "answer")`` are ``<think>`` ... ``</think>`` and
            ``<answer>`` ... ``</answer>``.
        can_continue: Text may follow the last block, such as an answer behind ``<think>``.
        name: Of the component.

    Raises:
        ValueError: No blocks, one twice, or one that is no name of a tag.
    """

    blocks: tuple[str, ...] = ("think", "answer")
    can_continue: bool = False
    name: str = "format"

    def __post_init__(self) -> None:
        check_blocks("Format.blocks", self.blocks)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(has_form(completion.text, self.blocks, can_continue=self.can_continue))


@dataclass(frozen=True)
class TagCount(ExtraReward):
    """The share of the tags that stand in the completion exactly once, wherever.

    It pays for form alone, on the way to ``Format``: weigh it little (Scalpel, 2507.10616, has
    0.05 beside 0.1 for the format and 1 for the answer).

    Args:
        blocks: Names of the tags, opening and closing counted apart.
        name: Of the component.

    Raises:
        ValueError: No blocks, one twice, or one that is no name of a tag.
    """

    blocks: tuple[str, ...] = ("think", "answer")
    name: str = "tag_count"

    def __post_init__(self) -> None:
        check_blocks("TagCount.blocks", self.blocks)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return share_of_tags(completion.text, self.blocks)
