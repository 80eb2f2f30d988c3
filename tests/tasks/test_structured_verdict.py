"""Strict scoring of laid-out answers, and what the public validator of IFStruct lets pass."""

import json
from typing import Any

import pytest

from tropism.tasks.structured_layout import Layout
from tropism.tasks.structured_schema import Field, json_schema
from tropism.tasks.structured_verdict import blocks_of, ifstruct_compat, made_up, plain, strict

PROMPT = "Make up a lighthouse with the keys keeper, stairs, height, haunted, style, note, rooms."
SCHEMA = json_schema(
    Field(
        "answer",
        "object",
        fields=(
            Field("keeper", "string", minimum=2, maximum=20),
            Field("stairs", "integer", minimum=10, maximum=90),
            Field("height", "number"),
            Field("haunted", "boolean"),
            Field("style", "enum", options=("gothic", "modern")),
            Field("note", "string", optional=True, contains=("a double quote",)),
            Field(
                "rooms",
                "array",
                items=Field("item", "object", fields=(Field("use", "string"),)),
            ),
        ),
    )
)
ADA: dict[str, Any] = {
    "keeper": "Ada Holm",
    "stairs": 12,
    "height": 31.5,
    "haunted": False,
    "style": "gothic",
    "note": 'Says "hi"',
    "rooms": [{"use": "brewing"}],
}
BEN: dict[str, Any] = {
    "keeper": "Ben Osei",
    "stairs": 90,
    "height": 7,
    "haunted": True,
    "style": "modern",
    "rooms": [{"use": "naps"}, {"use": "tango"}],
}
ONE = Layout()
FENCED = Layout(fence="required")
BARE = Layout(fence="forbidden")
TALKING = Layout(fence="required", can_comment=True)
WRAPPED = Layout(wrapper="records")
THREE = Layout(count=(2, 3), wrapper="records")
YAML = Layout("yaml")
A, B = json.dumps(ADA), json.dumps(BEN)
YAML_ADA = """keeper: Ada Holm
stairs: 12
height: 31.5
haunted: false
style: gothic
note: Says "hi"
rooms:
- use: brewing"""
XML_ADA = (
    "<answer><keeper>Ada Holm</keeper><stairs>12</stairs><height>31.5</height>"
    "<haunted>false</haunted><style>gothic</style><note>Says &quot;hi&quot;</note>"
    "<rooms><item><use>brewing</use></item></rooms></answer>"
)
MARKDOWN_ADA = """- keeper: Ada Holm
- stairs: 12
- height: 31.5
- haunted: false
- style: gothic
- note: Says "hi"
- rooms:
  - item:
    - use: brewing"""


def changed(item: dict[str, Any], **values: Any) -> str:
    return json.dumps({**item, **values})


def verdict(completion: str, layout: Layout) -> tuple[float, float]:
    """Strict pass, and the lenient one."""
    return (
        strict(completion, SCHEMA, layout, PROMPT)["pass"],
        ifstruct_compat(completion, SCHEMA, layout),
    )


@pytest.mark.parametrize(
    ("completion", "layout"),
    [
        (A, ONE),
        (f"\n{A}\n", ONE),
        (f"```json\n{A}\n```", ONE),
        (f"```\n{A}\n```", FENCED),
        (A, BARE),
        (f"Here:\n```json\n{A}\n```\nEnjoy!", TALKING),
        (f'{{"records": {B}}}', WRAPPED),
        (f'{{"records": [{A}, {B}]}}', THREE),
        (f"[{A}, {B}]", Layout(count=(2, 2))),
        (YAML_ADA, YAML),
        (f"```yaml\n{YAML_ADA}\n```", YAML),
        (f"```yml\n{YAML_ADA}\n```", YAML),
        (
            f"```yaml\n# for you\n{YAML_ADA}\n```",
            Layout("yaml", fence="required", can_comment=True),
        ),
        (XML_ADA, Layout("xml")),
        (f"```xml\n{XML_ADA}\n```", Layout("xml", fence="required")),
        (XML_ADA.replace("answer", "records"), Layout("xml", "records")),
        (MARKDOWN_ADA, Layout("markdown")),
        (f"# records\n\n{MARKDOWN_ADA}", Layout("markdown", "records")),
    ],
)
def test_right_answers_pass_both(completion: str, layout: Layout) -> None:
    assert verdict(completion, layout) == (1.0, 1.0)
    assert set(strict(completion, SCHEMA, layout, PROMPT).values()) == {1.0}


@pytest.mark.parametrize(
    ("completion", "layout"),
    [
        (f"```json\n{A}\n```", BARE),  # a fence that was forbidden
        (A.replace("31.5", "NaN"), ONE),
        (A.replace("31.5", "Infinity"), ONE),
        (A[:-1] + ', "stairs": 13}', ONE),  # a key twice
        (f"# Sure, here you go\n{YAML_ADA}", YAML),
        (f"{YAML_ADA}\nstairs: 13", YAML),
        (f"```json\n{A}\n```\nor\n```json\n{A}\n```", ONE),  # text between two fences
        (f"```json\n{A}\n```\n```json\n{B}\n```", FENCED),
        (f"```python\n{A}\n```", FENCED),
        (changed(ADA, rooms=[{"use": ""}]), ONE),  # empty
        (changed(ADA, rooms=[{"use": "..."}]), ONE),
        (changed(ADA, keeper="the keeper"), ONE),  # copied from the prompt
        (changed(ADA, keeper="lighthouse"), ONE),
        (f'{{"records": [{A}, {changed(ADA, stairs=13)}]}}', THREE),  # the same again
        (changed({k: v for k, v in ADA.items() if k != "note"}, rooms=[{"use": "ada holm"}]), ONE),
    ],
)
def test_what_only_the_public_validator_lets_pass(completion: str, layout: Layout) -> None:
    assert verdict(completion, layout) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "layout"),
    [
        ("", ONE),
        (A, FENCED),  # no fence
        (f"```json\n{A}", FENCED),  # an open one
        (f"Sure!\n```json\n{A}\n```", ONE),  # commentary
        (f"```json\n{A}\n```\nEnjoy!", FENCED),
        (f"Sure! {A}", ONE),
        (f"Sure! {A}", TALKING),
        (A[:-1], ONE),
        (A, WRAPPED),
        (f'{{"record": {A}}}', WRAPPED),
        (f'{{"records": {A}, "more": 1}}', WRAPPED),
        (f'{{"records": {A}}}', ONE),
        (f'{{"records": [{A}]}}', WRAPPED),
        (f'{{"records": [{A}]}}', THREE),
        (f'{{"records": [{A}, {B}, {A}, {B}]}}', THREE),
        (f'{{"records": {A}}}', THREE),
        (f'{{"records": [{A}, 3]}}', THREE),
        (f"[{A}]", ONE),
        (changed(ADA, stairs=True), ONE),  # a bool is no number
        (changed(ADA, stairs=12.0), ONE),  # 2.0 is no integer
        (changed(ADA, stairs="12"), ONE),
        (changed(ADA, height=False), ONE),
        (changed(ADA, haunted=0), ONE),
        (changed(ADA, stairs=9), ONE),
        (changed(ADA, stairs=91), ONE),
        (changed(ADA, keeper="A"), ONE),  # too short
        (changed(ADA, keeper="Ada " * 9), ONE),
        (changed(ADA, style="baroque"), ONE),
        (changed(ADA, note=None), ONE),  # optional is not null
        (changed(ADA, note="says hi"), ONE),  # without the quote
        (changed(ADA, extra=1), ONE),
        (changed(ADA, rooms=[]), ONE),
        (changed(ADA, rooms=[{"use": "naps"}] * 2), ONE),
        (changed(ADA, rooms=[{"use": "naps", "size": 2}]), ONE),
        (changed(ADA, rooms=[{}]), ONE),
        (changed(ADA, rooms=["naps"]), ONE),
        (json.dumps({k: v for k, v in ADA.items() if k != "keeper"}), ONE),
        (A, YAML),  # flow style
        (YAML_ADA, ONE),
        (YAML_ADA.replace("Ada Holm", "2020-01-01"), YAML),  # a date
        (f"{YAML_ADA}\n  built: 2020-01-01", YAML),  # one more key, and a value that JSON lacks
        (f"Sure, here you go\n{YAML_ADA}", YAML),
        (XML_ADA, Layout("xml", "records")),
        (XML_ADA.replace("<stairs>12", "<stairs>12.0"), Layout("xml")),
        (XML_ADA.replace("<stairs>", '<stairs unit="m">'), Layout("xml")),
        (XML_ADA.replace("false", "False"), Layout("xml")),
        (MARKDOWN_ADA, Layout("markdown", "records")),
        (f"# records\n\n{MARKDOWN_ADA}", Layout("markdown")),
        (f"Sure:\n\n{MARKDOWN_ADA}", Layout("markdown")),
        ("[" * 19_000, ONE),
        (A + " " * 20_000, ONE),
    ],
)
def test_wrong_answers_pass_neither(completion: str, layout: Layout) -> None:
    assert verdict(completion, layout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "layout", "expected"),
    [
        (f"```json\n{A}\n```", BARE, (1, 3 / 4, 1, 1)),
        (f"Sure!\n```json\n{A}\n```", WRAPPED, (1, 2 / 4, 1, 1)),
        (f'{{"record": [{A}]}}', THREE, (1, 2 / 4, 1, 1)),
        (
            f'{{"records": [{A}, {{"keeper": "Ben"}}]}}',
            THREE,
            (1, 1, (1 + 1 / 6) / 2, (1 + 1 / 6) / 2),
        ),
        (changed(BEN, extra=1), ONE, (1, 1, 6 / 7, 1)),
        (changed(ADA, note=3), ONE, (1, 1, 1, 6 / 7)),
        ("3", ONE, (0, 0, 0, 0)),
        ("[3]", ONE, (1, 3 / 4, 0, 0)),
        (f"# hi\n{YAML_ADA}", YAML, (1, 3 / 4, 1, 1)),
    ],
)
def test_shaped_parts_by_hand(completion: str, layout: Layout, expected: tuple[float, ...]) -> None:
    scores = strict(completion, SCHEMA, layout, PROMPT)
    assert [scores[name] for name in ("parse", "form", "keys", "types")] == pytest.approx(expected)
    assert scores["pass"] == 0.0


def test_plain_answers_are_one_json_object() -> None:
    assert set(plain(f"```json\n{A}\n```", SCHEMA, PROMPT).values()) == {1.0}
    assert set(plain(f"[{A}]", SCHEMA, PROMPT).values()) == {0.0}
    assert set(plain(YAML_ADA, SCHEMA, PROMPT).values()) == {0.0}


def test_blocks_of_a_text() -> None:
    blocks = blocks_of("a\n```json\nb\n\n```\nc\n  ```\nd\n```")
    assert blocks.inside == (("json", "b\n"), ("", "d"))
    assert blocks.outside == ("a", "c", "")
    assert blocks.is_closed
    assert not blocks_of("```json\nb").is_closed
    assert blocks_of("a ``` b\n````").inside == ()


def test_objects_that_say_the_same_are_not_made_up() -> None:
    assert made_up([ADA, BEN], SCHEMA, PROMPT)
    assert not made_up(
        [ADA, {**BEN, "keeper": "ADA  holm!", "rooms": ADA["rooms"], "note": ADA["note"]}],
        SCHEMA,
        PROMPT,
    )
    assert not made_up([{**BEN, "rooms": [{"use": "Ben Osei"}]}], SCHEMA, PROMPT)
