"""How a question is put to a model, and where in its text the answer is.

Three styles:
    chat   one user message, with a system message if one is given
    tags   chat that asks for reasoning and answer between tags (Scalpel vs Hammer, 2507.10616):
               <think>
               ...
               </think>
               <answer>
               ...
               </answer>
    raw    the text itself, for base models; with ``Question: ...\\nAnswer:`` around it by default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tropism.tasks.tags import has_form, only_block, share_of_tags
from tropism.types import Message, Prompt

Style = Literal["chat", "tags", "raw"]
BLOCKS = ("think", "answer")
SYSTEM_FOR_TAGS = (
    "A conversation between a user and an assistant. The user asks a question, and the assistant "
    "first thinks about it and then answers. Reasoning and answer stand between tags, each on "
    "lines of its own:\n<think>\nreasoning here\n</think>\n<answer>\nanswer here\n</answer>"
)
RAW_TEMPLATE = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class PromptFormat:
    """Turns a question into a prompt, and a completion into an answer.

    Args:
        style: ``chat``, ``tags`` or ``raw``.
        system: System message of ``chat`` and ``tags``; null for the one that explains the tags,
            or for none.
        template: Text of ``raw``, with ``{question}`` in it.

    Raises:
        ValueError: An unknown style, a system message where there can be none, or a template
            without the question.
    """

    style: Style = "chat"
    system: str | None = None
    template: str = RAW_TEMPLATE

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(f"style={self.style!r}: choose from {get_args(Style)}.")
        if self.style == "raw" and self.system is not None:
            raise ValueError("style='raw' has no system message: put it into `template`.")
        if "{question}" not in self.template:
            raise ValueError(f"template={self.template!r} lacks {{question}}.")

    @property
    def components(self) -> tuple[str, ...]:
        """Reward components that this form brings: ``format`` and ``tag_count`` with tags."""
        return ("format", "tag_count") if self.style == "tags" else ()

    def prompt(self, *, id: str, task: str, question: str, columns: Mapping[str, Any]) -> Prompt:
        """The prompt that asks ``question``."""
        if self.style == "raw":
            text = self.template.replace("{question}", question)
            return Prompt(id=id, task=task, text=text, columns=columns)
        system = SYSTEM_FOR_TAGS if self.style == "tags" and self.system is None else self.system
        messages: tuple[Message, ...] = ({"role": "user", "content": question},)
        if system:
            messages = ({"role": "system", "content": system}, *messages)
        return Prompt(id=id, task=task, messages=messages, columns=columns)

    def answer(self, completion: str) -> str | None:
        """The part of a completion that is judged.

        With tags what stands in the one answer block; None where it is missing, blank, inside the
        reasoning, or not the only one, so that several guesses are no answer. Without tags all.
        """
        if self.style != "tags":
            return completion
        return only_block(completion, "answer", outside="think")

    def gold(self, answer: str, reasoning: str) -> str:
        """A right answer as a model is to write it, for SFT.

        Args:
            answer: What is judged; ``answer`` gives it back, but for blanks around it.
            reasoning: With tags, what stands between the first two; not blank.
        """
        if self.style == "tags":
            return f"<think>\n{reasoning}\n</think>\n<answer>\n{answer}\n</answer>"
        needs_blank = self.style == "raw" and not self.template[-1].isspace()
        return f" {answer}" if needs_blank else answer

    def scores(self, completion: str) -> dict[str, float]:
        """What ``components`` are of a completion.

        ``format`` is 1 for exactly the template, with something in either block. ``tag_count`` is
        a quarter for each tag that stands there exactly once, wherever: it pays for form alone, so
        it should weigh little.
        """
        if self.style != "tags":
            return {}
        return {
            "format": float(has_form(completion, BLOCKS)),
            "tag_count": share_of_tags(completion, BLOCKS),
        }
