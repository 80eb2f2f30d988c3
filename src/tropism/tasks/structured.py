"""Structured output: make up a thing and write it as one object that meets a schema.

A sample prompt (tier 1, style "bullets") and an answer that passes:
    Make up a lighthouse. Answer with one line of JSON like {"keeper": "...", "floor_total": 31,
    "haunted": true} and nothing else. The keys:
    - keeper: text
    - floor_total: whole number
    - haunted: true or false

    {"keeper": "Ada Holm", "floor_total": 6, "haunted": false}

Procedural, after IFStruct v1.0 (Liquid AI): entity -> schema -> prompt style -> constraints. Train,
validation and test share no field name, entity, enum value or wrapper key. In tiers 0-2 the answer
may be plain or one fenced block; tiers 3 and 4 say where it stands (``structured_documents``).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.splits import NotEnoughPromptsError, check_split
from tropism.tasks.structured_answers import (
    filled,
    filled_content,
    invented,
    invented_content,
)
from tropism.tasks.structured_documents import draw_document
from tropism.tasks.structured_layout import FORMATS, Format, Layout
from tropism.tasks.structured_names import NAMES
from tropism.tasks.structured_prompts import STYLES, render
from tropism.tasks.structured_schema import json_schema
from tropism.tasks.structured_tiers import TIERS, draw_schema
from tropism.tasks.structured_verdict import ifstruct_compat, plain, strict
from tropism.tasks.structured_vocabulary import INVENTED_STRINGS, THEMES
from tropism.tasks.structured_writers import write
from tropism.types import Prompt

Primary = Literal["pass", "ifstruct_compat"]

_PATIENCE = 1000
"""So many rows in a row without a new prompt mean that there is none left."""
_REASONING = (
    "I need one value for each key, of the type that is asked for, and none of them copied."
)


class StructuredOutput(Task):
    """Procedural schemas, scored strictly, and as the public validator of IFStruct does.

    Components: ``parse`` (the answer is one document of the format, strictly), ``keys`` (shared key
    paths over all key paths, 1 only for exactly the right keys), ``types`` (share of the top-level
    fields that are present with the right type) and ``pass`` (binary: all of them, enums, bounds,
    and every made-up string neither blank nor copied from the prompt, nor all strings the same).
    With tiers 3 and 4, other formats than JSON or another primary there are two more: ``form``
    (share of fence, commentary, top-level key and count that are right; all of them are part of
    ``pass``) and ``ifstruct_compat`` (binary: what the public validator passes; it lets pass a
    fence that was forbidden, NaN, duplicate keys, empty strings, comments).

    Args:
        tier: 0 (1-2 flat fields), 1 (3-4 typed fields), 2 (5-6 fields with an enum, ranges, and
            an array or a nested object), 3 (optional fields and lengths; how many objects, under
            which key, in which fence) or 4 (parts inside parts, characters to escape, prompts of
            some 500 tokens that take back what they said).
        name: Identifies the task in records and metrics.
        formats: Of the answers, mixed evenly: ``json``, ``yaml``, ``xml``, ``markdown``.
        primary: The component that evaluation reports.
        prompt_format: How the question is put; null for a user message and nothing else.

    Raises:
        ValueError: No such tier, format or component.
    """

    # By instance, where other tasks have them by class.
    components: tuple[str, ...]  # type: ignore[misc]
    primary: str  # type: ignore[misc]

    def __init__(
        self,
        tier: int = 1,
        name: str = "structured",
        *,
        formats: tuple[Format, ...] = ("json",),
        primary: Primary = "pass",
        prompt_format: PromptFormat | None = None,
    ) -> None:
        formats = tuple(formats)
        if tier not in range(len(TIERS)):
            raise ValueError(f"tier={tier}: choose from 0 to {len(TIERS) - 1}.")
        if not formats or len(set(formats)) < len(formats) or not set(formats) <= set(FORMATS):
            raise ValueError(f"formats={formats}: name each once, out of {FORMATS}.")
        if primary not in get_args(Primary):
            raise ValueError(f"primary={primary!r}: choose from {get_args(Primary)}.")
        self.tier = tier
        self.name = name
        self.formats = formats
        self.primary = primary
        self.prompt_format = prompt_format or PromptFormat()
        is_plain = formats == ("json",) and not TIERS[tier].should_lay_out
        more = () if is_plain and primary == "pass" else ("form", "ifstruct_compat")
        own = ("parse", "keys", "types", "pass", *more)
        self.components = (*own, *self.prompt_format.components)

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct prompts; more of them begin with the same ones.

        Raises:
            NotEnoughPromptsError: The tier has fewer distinct prompts than that.
            ValueError: Unknown split.
        """
        check_split(split)
        prompts: dict[str, Prompt] = {}
        num_misses = row = 0
        while len(prompts) < num and num_misses < _PATIENCE:
            prompt = self._prompt(split, f"{self.tier}/{split}/{seed}/{row}")
            num_misses = num_misses + 1 if prompt.id in prompts else 0
            prompts.setdefault(prompt.id, prompt)
            row += 1
        if len(prompts) < num:
            raise NotEnoughPromptsError(
                self.name, split, num, len(prompts), f"take a tier above {self.tier}"
            )
        return list(prompts.values())

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """Every component; all of the task's own are 0 for what does not parse."""
        answer = self.prompt_format.answer(completion) or ""
        schema, layout = prompt.columns["schema"], _layout(prompt)
        if layout is None:
            scores = plain(answer, schema, _question(prompt))
            scores["form"] = scores["parse"]
        else:
            scores = strict(answer, schema, layout, _question(prompt))
        if "ifstruct_compat" in self.components:
            scores["ifstruct_compat"] = ifstruct_compat(answer, schema, layout or Layout())
        scores |= self.prompt_format.scores(completion)
        return {name: scores[name] for name in self.components}

    def gold(self, prompt: Prompt) -> str | None:
        """An answer that passes, its strings out of a fixed list."""
        draw = random.Random(f"gold/{prompt.columns['row_hash']}")
        schema, layout = prompt.columns["schema"], _layout(prompt)
        if layout is None:
            strings = iter(draw.sample(INVENTED_STRINGS, len(INVENTED_STRINGS)))  # none twice
            answer = json.dumps(invented(schema, strings, draw))
        else:
            answer = write(invented_content(schema, layout, draw), layout)
        return self.prompt_format.gold(answer, _REASONING)

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """``constant``: one fixed object. ``schema_echo``: the block of the prompt that shows the
        schema, as it is. ``schema_echo_json``: the right keys and types, filled from the schema,
        in the format and layout that are asked for.
        """
        answers: Mapping[str, Callable[[Prompt], str]] = {
            "constant": lambda prompt: '{"name": "Ada Holm", "age": 36, "active": true}',
            "schema_echo": lambda prompt: str(prompt.columns["block"]),
            "schema_echo_json": _schema_echo,
        }
        return {name: self._as_asked(answer) for name, answer in answers.items()}

    def _as_asked(self, answer: Callable[[Prompt], str]) -> Callable[[Prompt], str]:
        return lambda prompt: self.prompt_format.gold(answer(prompt), _REASONING)

    def _prompt(self, split: Split, key: str) -> Prompt:
        """The prompt of one row; ``key`` seeds it."""
        row_hash = hashlib.sha256(key.encode()).hexdigest()
        draw = random.Random(row_hash)
        theme = draw.choice(THEMES[split])
        tier = TIERS[self.tier]
        root = draw_schema(tier, theme, draw)
        noun = draw.choice(theme.entities)
        # A generator of its own: what JSON prompts say does not depend on the other formats.
        format = random.Random(f"format/{row_hash}").choice(self.formats)
        columns: dict[str, Any] = {}
        if format == "json" and not tier.should_lay_out:
            style = draw.choice(sorted(STYLES))
            text, block = render(
                style, noun, root, should_show_example=tier.should_show_example, draw=draw
            )
        else:
            document = draw_document(
                root,
                format=format,
                tier=tier,
                theme=theme,
                noun=noun,
                names=NAMES[split],
                draw=draw,
            )
            text, block, style, root = document.text, document.block, document.style, document.root
            columns["layout"] = asdict(document.layout)
        return self.prompt_format.prompt(
            id=f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}",
            task=self.name,
            question=text,
            columns={
                "schema": json_schema(root),
                "block": block,
                "format": format,
                "style": style,
                "entity": noun,
                "row_hash": row_hash,
                **columns,
            },
        )


def _layout(prompt: Prompt) -> Layout | None:
    """How the answer must stand; None for the plain JSON of tiers 0-2."""
    columns = prompt.columns.get("layout")
    return None if columns is None else Layout(**columns)


def _question(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.messages is not None
    return prompt.messages[-1]["content"]


def _schema_echo(prompt: Prompt) -> str:
    schema, layout = prompt.columns["schema"], _layout(prompt)
    if layout is None:
        return json.dumps(filled(schema))
    return write(filled_content(schema, layout), layout)
