"""Tiers 3 and 4 and the other formats: golds, disjoint words, prompts that say what is judged."""

import re
from itertools import combinations
from typing import Any

import jsonargparse
import pytest

from tropism.tasks.base import Task
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.structured import StructuredOutput
from tropism.tasks.structured_layout import FORMATS, Format
from tropism.tasks.structured_names import NAMES
from tropism.tasks.structured_schema import schema_paths
from tropism.tasks.structured_styles import DOCUMENT_STYLES
from tropism.tasks.structured_tiers import TIERS
from tropism.tasks.structured_vocabulary import THEMES
from tropism.types import Prompt

SPLITS = ("train", "validation", "test")
ALL_TIERS = range(len(TIERS))


def text_of(prompt: Prompt) -> str:
    assert prompt.messages is not None
    return prompt.messages[-1]["content"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tier", ALL_TIERS)
def test_golds_pass_and_those_of_other_rows_do_not(tier: int, format: Format) -> None:
    task = StructuredOutput(tier, formats=(format,), primary="ifstruct_compat")
    styles = set()
    for split in SPLITS:
        prompts = task.prompts(split, 15, seed=0)
        golds = [task.gold(prompt) for prompt in prompts]
        for place, (prompt, gold) in enumerate(zip(prompts, golds, strict=True)):
            styles.add(prompt.columns["style"])
            assert gold is not None
            assert set(task.score(prompt, gold).values()) == {1.0}, text_of(prompt) + gold
            assert task.score(prompt, gold[:-1])["pass"] == 0.0 or format != "json"
            assert set(task.score(prompt, "").values()) == {0.0}
            other = golds[place - 1]
            assert other is not None
            is_equal = prompts[place - 1].columns["schema"] == prompt.columns["schema"]
            assert is_equal or task.score(prompt, other)["pass"] == 0.0
            for name, answer in task.baselines().items():
                assert task.score(prompt, answer(prompt))["pass"] == 0.0, name
    is_plain = format == "json" and tier <= 2
    assert styles == (
        {"bullets", "example", "prose", "schema", "table"} if is_plain else set(DOCUMENT_STYLES)
    )


def test_names_of_the_splits_are_disjoint() -> None:
    words: dict[str, set[str]] = {}
    for split in SPLITS:
        names = NAMES[split]
        own = [*names.wrappers, *names.sections, *names.lists, *names.awkward]
        assert len(set(own)) == len(own)
        words[split] = set(own)
        for theme in THEMES[split]:
            fields = {field.name for field in theme.strings + theme.others + theme.rich}
            assert not fields & set(own)
    for one, other in combinations(SPLITS, 2):
        assert not words[one] & words[other]


def keys_of(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    own = set(schema.get("properties", {}))
    return own.union(
        *(keys_of(part) for part in (*schema.get("properties", {}).values(), schema.get("items")))
    )


def test_drawn_prompts_of_the_splits_are_disjoint() -> None:
    task = StructuredOutput(4, formats=FORMATS)
    keys, wrappers = {}, {}
    for split in SPLITS:
        prompts = task.prompts(split, 120, seed=1)
        keys[split] = set().union(*(keys_of(p.columns["schema"]) for p in prompts))
        wrappers[split] = {p.columns["layout"]["wrapper"] for p in prompts} - {None}
        assert {p.columns["format"] for p in prompts} == set(FORMATS)
        assert len(wrappers[split]) >= 5
    for one, other in combinations(SPLITS, 2):
        assert not keys[one] & keys[other]
        assert not wrappers[one] & wrappers[other]
        assert not keys[one] & wrappers[other]


def test_layouts_are_drawn_as_promised() -> None:
    prompts = StructuredOutput(3, formats=("yaml",)).prompts("train", 400, seed=0)
    layouts = [prompt.columns["layout"] for prompt in prompts]
    assert 0.42 < sum(layout["wrapper"] is not None for layout in layouts) / 400 < 0.58
    assert {layout["fence"] for layout in layouts} == {"free", "required", "forbidden"}
    counts = [layout["count"] for layout in layouts]
    assert any(c is None for c in counts)
    assert any(c is not None and c[0] == c[1] for c in counts)
    assert any(c is not None and c[0] < c[1] for c in counts)
    for prompt, layout in zip(prompts, layouts, strict=True):
        text = text_of(prompt)
        assert ("one fenced code block" in text) == (layout["fence"] == "required")
        assert ("Do not use a code block" in text) == (layout["fence"] == "forbidden")
        assert ("Write nothing else" in text) != layout["can_comment"]
        if layout["wrapper"]:
            assert f'"{layout["wrapper"]}"' in text
        if layout["count"]:
            fewest, most = layout["count"]
            number = f"exactly {fewest}" if fewest == most else f"{fewest} to {most}"
            assert f"{number} different entries" in text


@pytest.mark.parametrize("format", FORMATS)
def test_hard_prompts_name_every_key_and_revise_themselves(format: Format) -> None:
    prompts = StructuredOutput(4, formats=(format,)).prompts("train", 150, seed=0)
    num_words, seen = 0, set()
    for prompt in prompts:
        text, schema = text_of(prompt), prompt.columns["schema"]
        num_words += len(re.findall(r"\w+|[^\w\s]", text))
        assert prompt.columns["block"] in text
        for key in keys_of(schema):
            assert re.search(rf"\b{key}\b", text), key
        for phrase in ("Hold on", "after all", "Wait,", "On second thought", "range of", "Forget"):
            if phrase in text:
                seen.add(phrase)
        renamed = re.search(r'Wait, "(\w+)" is a poor name: call that key "(\w+)"', text)
        if renamed:
            assert renamed.group(1) in prompt.columns["block"]
            assert renamed.group(1) not in keys_of(schema)
            assert renamed.group(2) in schema["properties"]
        dropped = re.search(r'leave "(\w+)" out', text)
        if dropped:
            assert dropped.group(1) in prompt.columns["block"]
            assert dropped.group(1) not in keys_of(schema)
        ranged = re.search(r'range of "(\w+)" wrong: it goes from (\d+) to (\d+)', text)
        if ranged:
            field = schema["properties"][ranged.group(1)]
            assert (field["minimum"], field["maximum"]) == tuple(map(int, ranged.groups()[1:]))
        forced = re.search(r'Forget that "(\w+)" is optional', text)
        if forced:
            assert forced.group(1) in schema["required"]
        assert max(len(path) for path in schema_paths(schema)) == 3
        assert any("allOf" in child for child in schema["properties"].values())
    assert len(seen) == 6
    assert 250 < num_words / len(prompts) < 900


def test_each_row_can_be_told_by_its_hash_and_formats_do_not_disturb_json() -> None:
    json_only = StructuredOutput(1).prompts("train", 60, seed=0)
    mixed = StructuredOutput(1, formats=("json", "yaml")).prompts("train", 60, seed=0)
    assert len({p.columns["row_hash"] for p in mixed}) == 60
    texts = {text_of(prompt) for prompt in json_only}
    plain = [prompt for prompt in mixed if prompt.columns["format"] == "json"]
    assert 15 < len(plain) < 45
    assert sum(text_of(prompt) in texts for prompt in plain) >= len(plain) - 3


def test_components_and_primary() -> None:
    plain = ("parse", "keys", "types", "pass")
    assert StructuredOutput(1).components == plain
    both = (*plain, "form", "ifstruct_compat")
    assert StructuredOutput(3).components == both
    assert StructuredOutput(1, formats=("json", "xml")).components == both
    task = StructuredOutput(1, primary="ifstruct_compat")
    assert (task.components, task.primary) == (both, "ifstruct_compat")
    (prompt,) = task.prompts("train", 1, seed=0)
    lazy = task.baselines()["schema_echo_json"](prompt)
    scores = task.score(prompt, lazy)
    assert (scores["pass"], scores["ifstruct_compat"], scores["form"]) == (0.0, 1.0, 1.0)


def test_with_tags_only_the_answer_block_is_judged() -> None:
    task = StructuredOutput(3, formats=("yaml",), prompt_format=PromptFormat(style="tags"))
    (prompt,) = task.prompts("train", 1, seed=0)
    gold = task.gold(prompt)
    assert gold is not None
    assert set(task.score(prompt, gold).values()) == {1.0}
    assert task.score(prompt, gold.replace("<answer>", ""))["pass"] == 0.0
    raw = StructuredOutput(0, prompt_format=PromptFormat(style="raw"))
    (prompt,) = raw.prompts("train", 1, seed=0)
    gold = raw.gold(prompt)
    assert gold is not None
    assert raw.score(prompt, gold)["pass"] == 1.0


def test_a_config_names_formats_and_prompt_format() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--task", type=Task)
    settings = {"tier": 4, "formats": ["xml", "markdown"], "prompt_format": {"style": "tags"}}
    path = "tropism.tasks.structured.StructuredOutput"
    config = {"class_path": path, "init_args": settings}
    task = parser.instantiate(parser.parse_object({"task": config})).task
    assert (task.tier, task.formats) == (4, ("xml", "markdown"))
    assert task.prompt_format == PromptFormat(style="tags")
    with pytest.raises(jsonargparse.ArgumentError, match="formats"):
        parser.parse_object({"task": {"class_path": path, "init_args": {"formats": ["toml"]}}})
