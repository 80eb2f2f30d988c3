"""Prompts for answers of any format and layout (tiers 3 and 4, and formats other than JSON).

A sample (tier 3, style "paths", YAML):
    Make up 2 to 3 different entries, each a lighthouse. These are the keys, with their paths:
    - keeper: text
    - garden: object
    - garden.hedge: text of 3 to 44 characters
    ...
    Answer in YAML, in block style, without braces or brackets. At the top level stands one key,
    "inventory", and under it the list. Put the answer into one fenced code block. Write nothing
    else, no comment and no explanation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tropism.tasks.structured_layout import FORMATS, Format, Layout, draw_layout
from tropism.tasks.structured_names import Names
from tropism.tasks.structured_prompts import example_of
from tropism.tasks.structured_revisions import revise
from tropism.tasks.structured_schema import Field
from tropism.tasks.structured_styles import (
    DOCUMENT_STYLES,
    FORMAT_NAMES,
    count_phrase,
    layout_sentences,
    with_article,
)
from tropism.tasks.structured_tiers import Tier, awkward_for, deepen
from tropism.tasks.structured_vocabulary import Theme
from tropism.tasks.structured_writers import write


@dataclass(frozen=True)
class Document:
    """A prompt's text, and what an answer to it must be.

    Args:
        text: What the model reads.
        block: The part of it that shows the schema.
        style: Key of ``DOCUMENT_STYLES``.
        root: Schema of one object.
        layout: How many of them there must be, and how they stand in the answer.
    """

    text: str
    block: str
    style: str
    root: Field
    layout: Layout


def draw_document(
    root: Field,
    *,
    format: Format,
    tier: Tier,
    theme: Theme,
    noun: str,
    names: Names,
    draw: random.Random,
) -> Document:
    """A prompt that asks for objects like ``root``.

    Args:
        root: What ``draw_schema`` gave for this tier and theme.
        format: Of the answer.
        tier: How hard it shall be.
        theme: Where further fields come from.
        noun: What is to be made up.
        names: Of wrapper keys and parts, those of the split.
        draw: The row's generator.
    """
    root, unused = deepen(root, tier, theme, names, awkward_for(format), draw)
    layout = draw_layout(format, names, draw) if tier.should_lay_out else Layout(format)
    style = draw.choice(sorted(DOCUMENT_STYLES))
    num_revisions = draw.randint(*tier.num_revisions)
    opening = f"Make up {count_phrase(layout.count, noun)}."
    takes_back = list[str]()
    if num_revisions and draw.random() < 0.5:
        num_revisions -= 1
        opening, takes_back = _revised_opening(layout, noun, draw)
    shown, revisions = revise(root, unused, num_revisions, draw)
    sentence, make_block = DOCUMENT_STYLES[style]
    block = make_block(shown, layout)
    one = "each entry" if layout.count else "the object"
    parts = [opening, sentence.format(block=block, one=one)]
    if tier.should_show_example and style != "annotated":
        example = write(example_of(shown, draw), replace(layout, fence="forbidden"))
        parts.append(f"It should look like this, with values of your own:\n{example}")
    closing = " ".join([*takes_back, *revisions, *layout_sentences(layout)])
    if tier.is_long:
        parts = [_story(noun, draw), *parts]
        closing = f"{_ADVICE}\n{closing}"
    return Document("\n".join([*parts, closing]), block, style, root, layout)


def _revised_opening(layout: Layout, noun: str, draw: random.Random) -> tuple[str, list[str]]:
    """A request for another number of entries or another format, and what takes it back."""
    final = count_phrase(layout.count, noun)
    if draw.random() < 0.5:
        other = FORMAT_NAMES[draw.choice([f for f in FORMATS if f != layout.format])]
        return (
            f"Make up {final}. I was going to ask for {other}.",
            [f"No {other} after all, please."],
        )
    wrong = draw.randint(6, 9)
    return (
        f"Make up {count_phrase((wrong, wrong), noun)}.",
        [f"Hold on, not {wrong}: make up {final}."],
    )


def _story(noun: str, draw: random.Random) -> str:
    who = draw.choice(_WRITERS)
    why = draw.choice(_REASONS)
    how = draw.choice(_HABITS)
    return f"{who} {why.format(noun=with_article(noun))} {how}"


_WRITERS = (
    "I look after the test data of a small team, and our old generator broke last night.",
    "We are building a demo for people who have never seen our tool, and the screens are empty.",
    "My colleague teaches a course on reading data, and asked me for material that is not real.",
    "Our importer has to be tried on something before the real shipment comes in next week.",
)
_REASONS = (
    "Somebody in the meeting said that it should be about {noun}, and nobody had a better idea, "
    "so that is what it will be.",
    "The page that we show first is about {noun}, so that is where I would like to begin.",
    "The first chapter deals with {noun}; the others can wait until I know that this works.",
)
_HABITS = (
    "Please use values that a reader would believe, not the same ones again and again, and no "
    "dummy words: the last time half of it was blank, and we had to throw all of it away.",
    "It is read by a program and then by a person. The program is strict about names and types, "
    "the person will notice when every value is the same or taken from this message.",
    "Invent all of it yourself. I will paste what you send into the tool as it is, so one wrong "
    "character costs me an hour, and I would rather spend that hour on something else.",
)
_ADVICE = (
    "Numbers are numbers and not texts, yes-or-no values are true or false, a whole number has no "
    "decimal point, and a key that I did not ask for must not be there. A key marked as optional "
    "may be absent, but then leave it out rather than give it without a value."
)
