"""A user's own schemas: rows of several shapes, named faults, answers that say nothing."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.schema_content import says_something
from tropism.tasks.schema_rows import SchemaRows
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

DATA = Path(
    os.environ.get("TROPISM_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "year": {"type": "integer", "minimum": 1450},
        "binding": {"enum": ["hard", "soft"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title"],
}
GOOD = '{"title": "Night Trains", "year": 1987, "tags": ["travel", "sleep"]}'


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(tmp_path: Path, *rows: Any, **settings: Any) -> SchemaRows:
    path = write(tmp_path / "rows.jsonl", list(rows))
    return SchemaRows(path, validation_fraction=0, test_fraction=0, **settings)


def only(task: SchemaRows) -> Prompt:
    return task.prompts("train", 1, seed=0)[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, (1, 1, 1)),
        (f"```json\n{GOOD}\n```", (1, 1, 1)),
        ('{"title": "Night Trains", "year": 1987.0}', (1, 0, 0)),
        ('{"title": "Night Trains", "year": true}', (1, 0, 0)),
        ('{"title": "Night Trains", "year": 1400}', (1, 0, 0)),
        ('{"title": "Night Trains", "pages": 3}', (1, 0, 0)),  # no extra keys
        ('{"year": 1987}', (1, 0, 0)),
        ('{"title": ""}', (1, 1, 0)),
        ('{"title": " "}', (1, 1, 0)),
        ('{"title": "title"}', (1, 1, 0)),  # copied from the prompt
        ('{"title": "<string>"}', (1, 1, 0)),
        ('{"title": "x", "tags": ["a", "a", "a"]}', (1, 1, 0)),
        ('{"title": "x", "tags": ["a", "a", "b"]}', (1, 1, 1)),
        ("{}", (1, 0, 0)),
        ("", (0, 0, 0)),
        ("null", (0, 0, 0)),
        (GOOD[:-1], (0, 0, 0)),
        (f"Sure! {GOOD}", (0, 0, 0)),
        (f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", (0, 0, 0)),
        (f"```yaml\n{GOOD}\n```", (0, 0, 0)),
        ('{"title": "a", "title": "b"}', (0, 0, 0)),
        ('{"title": NaN}', (0, 0, 0)),
        ("[" * 19_000, (0, 0, 0)),
        (GOOD + " " * 20_000, (0, 0, 0)),
    ],
)
def test_scores(tmp_path: Path, completion: str, expected: tuple[float, ...]) -> None:
    task = task_of(tmp_path, {"schema": BOOK})
    prompt = only(task)
    assert prompt.messages is not None
    assert json.dumps(BOOK) in prompt.messages[0]["content"]
    assert tuple(task.score(prompt, completion).values()) == expected


def test_what_is_to_be_found_in_the_prompt_may_be_copied_from_it(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"prompt": "Extract: Night Trains, 1987.", "schema": BOOK})
    assert task.score(only(task), '{"title": "Night Trains", "year": 1987}')["pass"] == 1.0
    assert task.score(only(task), '{"title": "", "year": 1987}')["pass"] == 0.0


def test_a_blank_that_the_schema_spells_out_is_no_fault(tmp_path: Path) -> None:
    schema = {"properties": {"sign": {"enum": ["", "-"]}, "word": {"type": "string"}}}
    task = task_of(tmp_path, {"schema": schema})
    assert task.score(only(task), '{"sign": "", "word": "Ada"}')["pass"] == 1.0
    assert task.score(only(task), '{"sign": "-", "word": " "}')["pass"] == 0.0


def test_yaml_rows_and_schemas_as_text(tmp_path: Path) -> None:
    row = {"request": {"schema_str": json.dumps(BOOK), "format": "yaml"}, "schema": 3}
    task = task_of(
        tmp_path, row, schema_column="request.schema_str", format_column="request.format"
    )
    prompt = only(task)
    assert prompt.columns["format"] == "yaml"
    for answer, passes in (
        ("title: Night Trains\nyear: 1987", 1.0),
        ("title: Night Trains\ntags: [travel, sleep]", 1.0),
        ("title: 1987-01-01", 0.0),
        ("title: x\ntitle: y", 0.0),
        ("```yaml\ntitle: Night Trains\n```", 1.0),
    ):
        assert task.score(prompt, answer)["pass"] == passes


def test_keys_that_the_schema_does_not_name_may_be_allowed(tmp_path: Path) -> None:
    task = task_of(tmp_path, {"schema": BOOK}, should_close=False)
    assert task.score(only(task), '{"title": "Night Trains", "pages": 3}')["pass"] == 1.0


def test_formats_are_checked_when_asked_for(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    for settings, passes in (({}, 1.0), ({"should_check_formats": True}, 0.0)):
        task = task_of(tmp_path, {"schema": schema}, **settings)
        assert task.score(only(task), '{"day": "Ada"}')["pass"] == passes


def test_messages_and_prompt_formats(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A book?"}]
    task = task_of(tmp_path, {"prompt": turns, "schema": BOOK})
    assert only(task).messages == tuple(turns)
    tags = PromptFormat(style="tags")
    task = task_of(tmp_path, {"schema": BOOK}, prompt_format=tags)
    assert task.components == ("parse", "valid", "pass", "format", "tag_count")
    assert set(task.score(only(task), tags.gold(GOOD, "Hm."))) == set(task.components)
    assert task.score(only(task), tags.gold(GOOD, "Hm."))["pass"] == 1.0
    assert task.score(only(task), GOOD)["pass"] == 0.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "line 1: column 'schema' is None, wanted a JSON Schema"),
        ({"schema": []}, r"column 'schema' is \[\], wanted a JSON Schema"),
        (
            {"schema": "{"},
            r"line 1: column 'schema' is '\{', no JSON text: Expecting property name",
        ),
        ({"schema": {"type": "whole"}}, "line 1: no JSON Schema that can be checked"),
        ({"schema": {"$ref": "https://example.com/x"}}, "Retrieval is disabled"),
        ({"schema": {}, "prompt": " "}, "column 'prompt' is ' ', wanted a text that is not blank"),
        ({"schema": {}, "prompt": []}, r"column 'prompt' is \[\], wanted a text that is not blank"),
        ({"schema": {}, "prompt": [{"role": "user"}]}, "column 'prompt' is .*wanted a text"),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        only(task_of(tmp_path, row))
    with pytest.raises(NotEnoughPromptsError):
        only(task_of(tmp_path, row, should_skip_unusable=True))


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        SchemaRows(str(tmp_path / "no.jsonl")).prompts("train", 1, seed=0)
    with pytest.raises(ValueError, match="the file has no rows"):
        SchemaRows(write(tmp_path / "empty.jsonl", [])).prompts("train", 1, seed=0)
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(ValueError, match="line 1: Expecting"):
        SchemaRows(str(tmp_path / "bad.jsonl")).prompts("train", 1, seed=0)
    with pytest.raises(ValueError, match=r"line 1: a row must be a JSON object, not \[\]"):
        only(task_of(tmp_path, []))
    with pytest.raises(ValueError, match="together 1 at most"):
        SchemaRows("x", validation_fraction=0.6, test_fraction=0.6)
    with pytest.raises(ValueError, match="column 'f' is 'toml'"):
        only(task_of(tmp_path, {"schema": {}, "f": "toml"}, format_column="f"))


def test_splits_are_disjoint_and_ordered_by_the_seed(tmp_path: Path) -> None:
    rows = [{"schema": {**BOOK, "title": f"Book {i}"}} for i in range(60)]
    task = SchemaRows(write(tmp_path / "rows.jsonl", rows + rows), test_fraction=0.3)
    ids = {}
    for split in ("train", "validation", "test"):
        with pytest.raises(NotEnoughPromptsError) as caught:
            task.prompts(split, 1000, seed=0)
        prompts = task.prompts(split, caught.value.num_available, seed=0)
        ids[split] = [prompt.id for prompt in prompts]
        assert list(task.prompts(split, 2, seed=0)) == list(prompts)[:2]
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == 60
    assert [p.id for p in task.prompts("train", 20, seed=1)] != ids["train"][:20]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 0}, True),
        ({"a": False}, True),
        ({"a": None}, False),
        ({"a": {"b": []}}, False),
        ({"z": 1}, False),
        ([1, 1], False),
        (3, False),
        ({"a": [0, 0]}, True),
        ({"a": [{"b": 1}, {"b": 1}]}, False),
        ({"a": "words"}, False),
        ({"a": "1-0-0"}, False),
        ({"a": "words", "b": "else"}, True),
    ],
)
def test_answers_that_say_something(value: Any, expected: bool) -> None:
    schema = {"properties": {"a": {}}}
    assert says_something(value, schema, "words of version 1-0-0") is expected


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no benchmark data in {DATA}")
def test_nemotron_examples(caplog: pytest.LogCaptureFixture) -> None:
    """Of the five rows of each file those in JSON or YAML can be checked."""
    folder = DATA / "nemotron_structured_examples"
    settings: dict[str, Any] = {
        "schema_column": "schema_str",
        "prompt_column": "responses_create_params.input",
        "format_column": "schema_type",
        "validation_fraction": 0,
        "test_fraction": 0,
        "should_skip_unusable": True,
    }
    task = SchemaRows(str(folder / "structured_outputs_v3_example.jsonl"), **settings)
    with caplog.at_level(logging.WARNING):
        prompts = task.prompts("train", 2, seed=0)
    assert "3 rows of" in caplog.text
    assert sorted(prompt.columns["format"] for prompt in prompts) == ["json", "yaml"]
    for prompt in prompts:
        assert prompt.messages is not None
        assert prompt.messages[-1]["role"] == "user"
        assert set(task.score(prompt, "{}").values()) <= {0.0, 1.0}
        assert task.score(prompt, "{}")["pass"] == 0.0
    task = SchemaRows(str(folder / "example.jsonl"), **settings)
    assert len(task.prompts("train", 5, seed=0)) == 5


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no benchmark data in {DATA}")
def test_a_part_of_json_schema_bench_by_its_name() -> None:
    task = SchemaRows("Github_trivial", data=str(DATA))
    (prompt,) = task.prompts("test", 1, seed=0)
    assert prompt.columns["schema"]
    (info,) = task.data_info()
    assert (info.benchmark, info.part, info.num_rows) == ("jsonschemabench", "Github_trivial", 429)
    assert SchemaRows("mine.jsonl").data_info() == []
