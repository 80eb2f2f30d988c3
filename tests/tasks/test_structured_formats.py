"""Parsers and writers of the four formats: what is malformed, and what attacks cost."""

import math
import time
from typing import Any

import pytest

from tropism.tasks.structured_formats import (
    LENIENT,
    STRICT,
    has_yaml_comments,
    load_json,
    load_yaml,
)
from tropism.tasks.structured_layout import FORMATS, Format, Layout
from tropism.tasks.structured_markup import parse_markdown, parse_xml, scalar
from tropism.tasks.structured_writers import write

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "mass": {"type": "number"},
        "live": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "vet": {"type": "object", "properties": {"visits": {"type": "integer"}}},
        "log": {
            "type": "array",
            "items": {"type": "object", "properties": {"at": {"type": "integer"}}},
        },
    },
}
AWKWARD_TEXTS = [
    'say "hi"',
    "back\\slash",
    "a: b # c",
    "<b>&amp;</b>",
    "*bold* _under_ `code`",
    "- dash",
    "1. first",
    "[x](y)",
    "# title",
    "1984",
    "true",
    "null",
    "~",
    "yes",
    "2020-01-01",
    "Zoë 🚀",
    "{brace}",
    "'single'",
    "%percent @at",
    "```",
]
THING: dict[str, Any] = {
    "name": "Ada Holm",
    "year": -3,
    "mass": 2.5,
    "live": False,
    "tags": AWKWARD_TEXTS,
    "vet": {"visits": 0},
    "log": [{"at": 1}, {"at": 2}],
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("wrapper", [None, "records"])
@pytest.mark.parametrize("num", [None, 1, 2])
def test_what_is_written_is_read_back(format: Format, wrapper: str | None, num: int | None) -> None:
    layout = Layout(format, wrapper, None if num is None else (num, num))
    content = THING if num is None else [THING] * num
    expected = content if layout.key is None else {layout.key: content}
    text = write(content, layout)
    schema = layout.content_schema(ITEM)
    for parsers in (STRICT, LENIENT):
        parsed = parsers[format](text, schema)
        assert parsed is not None
        if format != "markdown" or parsers is STRICT:  # leniently, ** is taken for bold type
            assert parsed == (expected, False)


@pytest.mark.parametrize("text", ["say\nmore", 'a\n"b"\n\\c', " b \n\n c"])
@pytest.mark.parametrize("format", ["json", "yaml"])
def test_line_breaks_in_json_and_yaml(format: Format, text: str) -> None:
    assert STRICT[format](write({"name": text}, Layout(format)), ITEM) == ({"name": text}, False)


def test_line_breaks_in_markup_are_trimmed_at_the_ends_only() -> None:
    assert parse_xml("<a><name>\n x\ny </name></a>", ITEM) == ({"a": {"name": "x\ny"}}, False)
    assert parse_markdown("- name: x\\\n  y", ITEM) == {"name": "x\ny"}
    assert parse_markdown("- name: x\n  y", ITEM) == {"name": "x y"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "{",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": -Infinity}',
        '{"a": 1, "a": 1}',
        '{"a": {"b": 1, "b": 2}}',
        "{'a': 1}",
        '{"a": 1} x',
        '{"a": 1,}',
        '{"a": "\\ud800"}',
        "[" * 5_000,
        '{"a": ' + "9" * 5_000 + "}",
        " " * 20_001,
    ],
)
def test_malformed_json(text: str) -> None:
    assert load_json(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2]",
        "{a: 1}",
        '{"a": 1}',
        "a: {}",
        "a: 1\na: 2",
        "a:\n  b: 1\n  b: 2",
        "a: &x 1\nb: *x",
        "a: !!str 1",
        "a: !!python/object/apply:os.system ['true']",
        "a: !x 1",
        "<<:\n  a: 1",
        "1: one",
        "true: one",
        "a: 1\n---\nb: 2",
        "a:\n\t- b",
        "a: 2020-13-45",
        "a: b: c",
        "? [x]\n: 1",
        "a: " + "9" * 5_000,
        "a: " + "0:" * 200 + "0.",
        "a: '\x00'",
        "a: 1\n" * 5_000,
        "".join(" " * depth + "a:\n" for depth in range(30)) + " " * 30 + "b",
    ],
)
def test_malformed_yaml(text: str) -> None:
    assert load_yaml(text) is None


def test_yaml_reads_types_as_its_readers_do() -> None:
    text = "a: 1\nb: 1.5\nc: yes\nd: '1'\ne: |-\n  x # y\nf: 2020-01-01\ng: .nan"
    value = load_yaml(text)
    assert value.pop("f").year == 2020
    assert math.isnan(value.pop("g"))
    assert value == {"a": 1, "b": 1.5, "c": True, "d": "1", "e": "x # y"}
    assert load_yaml("a: [1, {b: 2}]", can_flow=True) == {"a": [1, {"b": 2}]}
    assert load_yaml("[" * 100, can_flow=True) is None


@pytest.mark.parametrize(
    ("text", "has_comments"),
    [
        ("a: 1", False),
        ("a: 1 # one", True),
        ("# Sure, here you go\na: 1", True),
        ("a: 1\n# done", True),
        ("a:\n  # inner\n  b: 1", True),
        ("a: x#y", False),
        ("a: 'x # y'", False),
        ("a: |\n  # text\n  more", False),
        ("a: | # header\n  text", True),
        ("a: |\n  text\n# after\nb: 1", True),
        ("a: Zoë 🚀\nb: 'é # é'", False),
        ("a: Zoë 🚀 # x", True),
    ],
)
def test_comments_in_yaml(text: str, has_comments: bool) -> None:
    assert has_yaml_comments(text) is has_comments
    assert STRICT["yaml"](text, ITEM) == (load_yaml(text), has_comments)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure!",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        "<!DOCTYPE a><a/>",
        '<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>',
        '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>',
        "<a>&x;</a>",
        '<a b="1"/>',
        '<a xmlns="http://x.org/1"><name>x</name></a>',
        '<a xmlns:p="http://x.org/1"><name>x</name></a>',
        '<p:a xmlns:p="http://x.org/1"><name>x</name></p:a>',
        '<a><name xmlns="http://x.org/1">x</name></a>',
        '<a><name xmlns="">x</name></a>',
        "<xml:a><name>x</name></xml:a>",
        "<p:a><name>x</name></p:a>",
        '<a xml:lang="en"><name>x</name></a>',
        "<a><?php x ?></a>",
        "<?target x?><a/>",
        "<a>text<name>x</name></a>",
        "<a><name>x</name>tail</a>",
        "<a><name>x</name><name>y</name></a>",
        "<a>" * 300,
        "<a>" * 30 + "</a>" * 30,
        "<a>\x00</a>",
        "<a><name>\ud800</name></a>",
        "Here it is: <a/>",
        "<a/> Done.",
        "<a>" + "x" * 20_000 + "</a>",
    ],
)
def test_malformed_xml(text: str) -> None:
    assert parse_xml(text, ITEM) == (None, False)


def test_xml_declaration_comments_and_sections() -> None:
    text = '<?xml version="1.0" encoding="UTF-8"?>\n<a><name><![CDATA[<x> & é]]></name></a>'
    assert parse_xml(text, ITEM) == ({"a": {"name": "<x> & é"}}, False)
    assert parse_xml("<a><!-- hi --><name>x<!-- y -->z</name></a>", ITEM) == (
        {"a": {"name": "xz"}},
        True,
    )
    assert parse_xml("<!-- hi --><a><name>x</name></a>", ITEM)[1] is True
    assert parse_xml("<a><tags/><vet/><name/></a>", ITEM)[0] == {
        "a": {"tags": [], "vet": {}, "name": ""}
    }
    # What looks like a namespace in a text is none.
    assert parse_xml('<a><name>x: &lt;b xmlns="y"&gt;</name></a>', ITEM)[0] == {
        "a": {"name": 'x: <b xmlns="y">'}
    }
    # A list whose items are called otherwise is an object, which the schema then refuses.
    assert parse_xml("<a><tags><tag>x</tag></tags></a>", ITEM)[0] == {"a": {"tags": {"tag": "x"}}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure!",
        "Here:\n\n- name: x",
        "- name: x\n\nDone.",
        "- name",
        "- name: x\n- name: y",
        "- vet: text\n  - visits: 1",
        "1. name: x",
        "- name: x\n\n# records",
        "## Item 1",
        "## Item 2\n\n- name: x",
        "## Item 1\n\n- name: x\n\n## Item 3\n\n- name: y",
        "### Item 1\n\n- name: x",
        "- log:\n  - entry:\n    - at: 1",
        "> - name: x",
        "-\n-",
        "- " * 60 + "x",
        "- name: " + "x" * 10_000,
    ],
)
def test_malformed_markdown(text: str) -> None:
    assert parse_markdown(text, ITEM) is None


def test_bold_keys_are_other_keys_but_leniently() -> None:
    text = "- **name**: x"
    assert STRICT["markdown"](text, ITEM) == ({"**name**": "x"}, False)
    assert LENIENT["markdown"](text, ITEM) == ({"name": "x"}, False)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", "integer", 3),
        ("-3", "integer", -3),
        ("3.0", "integer", "3.0"),
        ("+3", "integer", "+3"),
        ("1_000", "integer", "1_000"),
        ("٣", "integer", "٣"),
        ("three", "integer", "three"),
        ("3", "number", 3),
        ("3.5", "number", 3.5),
        ("1e3", "number", 1000.0),
        ("nan", "number", "nan"),
        ("inf", "number", "inf"),
        ("true", "boolean", True),
        ("True", "boolean", "True"),
        ("1", "boolean", "1"),
        ("3", "string", "3"),
        ("true", "string", "true"),
    ],
)
def test_scalars_of_markup(text: str, kind: str, value: object) -> None:
    found = scalar(text, {"type": kind})
    assert found == value
    assert type(found) is type(value)


def test_lenient_parsers_let_pass_what_the_public_one_does() -> None:
    assert LENIENT["json"]('{"a": 1, "a": NaN}', ITEM) is not None
    assert LENIENT["json"]("[" * 19_000, ITEM) is None
    assert LENIENT["yaml"]("# hi\na: 1\na: 2", ITEM) == ({"a": 2}, False)
    assert LENIENT["yaml"]("{a: 1}", ITEM) is None


@pytest.mark.parametrize(
    ("format", "attack"),
    [
        ("json", "[" * 19_000),
        ("yaml", "[" * 3_000),
        ("yaml", "- " * 9_000),
        ("yaml", "? " * 9_000),
        ("yaml", "a: " * 6_000),
        ("yaml", "&a " * 6_000),
        ("yaml", "'" * 19_000),
        ("xml", "<a>" * 6_000),
        ("xml", "<!--" * 4_000),
        ("xml", "&lt;" * 4_000),
        ("markdown", "- " * 4_900),
        ("markdown", "[" * 9_900),
        ("markdown", "*a_" * 3_000),
        ("markdown", "`" * 9_900),
        ("markdown", "- name: " + "\\" * 9_000),
        ("markdown", "- name: " + "&" * 9_000),
        ("markdown", "- a\n" * 2_400),
    ],
)
def test_attacks_on_a_parser_cost_little(format: Format, attack: str) -> None:
    start = time.process_time()
    for parsers in (STRICT, LENIENT):
        parsers[format](attack, ITEM)
    assert time.process_time() - start < 5.0
