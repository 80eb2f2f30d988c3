"""Structured output: disjoint splits, strict scoring, and the ways to cheat that must not pay."""

import hashlib
import json
from itertools import combinations

import pytest

from tropism.tasks import structured
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.tasks.structured import StructuredOutput
from tropism.tasks.structured_prompts import STYLES
from tropism.tasks.structured_schema import Field, json_schema
from tropism.tasks.structured_tiers import TIERS, Tier
from tropism.tasks.structured_vocabulary import THEMES, Theme
from tropism.types import Prompt

SPLITS = ("train", "validation", "test")
PROMPT_TEXT = "Make up a lighthouse with the keys keeper (text), stairs, height, haunted, style."


def make_prompt(*fields: Field) -> Prompt:
    schema = json_schema(Field("answer", "object", fields=fields))
    return Prompt(
        id="p",
        task="structured",
        messages=({"role": "user", "content": PROMPT_TEXT},),
        columns={"schema": schema, "format": "json", "block": PROMPT_TEXT},
    )


FLAT = make_prompt(
    Field("keeper", "string"),
    Field("stairs", "integer"),
    Field("height", "number"),
    Field("haunted", "boolean"),
)
RICH = make_prompt(
    Field("keeper", "string"),
    Field("stairs", "integer", minimum=10, maximum=90),
    Field("style", "enum", options=("gothic", "modern")),
    Field("rooms", "array", items=Field("item", "string")),
    Field("garden", "object", fields=(Field("hedge", "string"), Field("benches", "integer"))),
)
GOOD = '{"keeper": "Ada Holm", "stairs": 212, "height": 31.5, "haunted": false}'
RICH_GOOD = {
    "keeper": "Ada Holm",
    "stairs": 10,
    "style": "gothic",
    "rooms": ["kitchen", "lamp deck"],
    "garden": {"hedge": "hawthorn", "benches": 2},
}


def all_scores(completion: str, prompt: Prompt = FLAT) -> tuple[float | None, ...]:
    scores = StructuredOutput().score(prompt, completion)
    return tuple(scores[name] for name in ("parse", "keys", "types", "pass"))


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        f"\n  {GOOD}\n",
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}\n```\n",
        '{"haunted": true, "height": 31, "stairs": -2, "keeper": "1984"}',  # order, int as number
        '{"keeper": "Zo\\u00eb", "stairs": 0, "height": 1e3, "haunted": true}',
    ],
)
def test_right_answers_pass(completion: str) -> None:
    assert all_scores(completion) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "Sure! " + GOOD,
        GOOD + "\nI hope this helps.",
        GOOD + GOOD,
        f"```json\n{GOOD}\n```\nThis is a JSON object.",
        f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```",
        f"```yaml\n{GOOD}\n```",
        GOOD[:-1],
        GOOD.replace("31.5", "NaN"),
        GOOD.replace("31.5", "-Infinity"),
        GOOD.replace('"keeper"', "'keeper'"),
        GOOD.replace("false", "False"),
        GOOD[:-1] + ', "stairs": 3}',  # duplicate key
        GOOD[:-1] + ",}",
        "// lighthouse\n" + GOOD,
        f"[{GOOD}]",
        '"keeper"',
        "null",
        "[" * 100_000,
        '{"keeper": ' * 5_000 + "1" + "}" * 5_000,
        GOOD.replace("212", "9" * 6_000),
        GOOD.replace("Ada", "\\ud800"),
        GOOD + " " * 30_000,
    ],
)
def test_what_is_not_one_strict_json_object_scores_nothing(completion: str) -> None:
    assert all_scores(completion) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "keys", "types"),
    [
        ({"keeper": "Ada", "stairs": 2, "height": 1.5}, 3 / 4, 3 / 4),
        ({"keeper": "Ada", "stairs": 2, "height": 1.5, "haunted": True, "note": "x"}, 4 / 5, 1),
        ({"keeper": "Ada", "steps": 2, "height": 1.5, "haunted": True}, 3 / 5, 3 / 4),
        ({}, 0, 0),
        ({"keeper": "Ada", "stairs": 2.0, "height": 1.5, "haunted": True}, 1, 3 / 4),
        ({"keeper": "Ada", "stairs": True, "height": False, "haunted": True}, 1, 2 / 4),
        ({"keeper": "Ada", "stairs": "2", "height": "1.5", "haunted": "true"}, 1, 1 / 4),
        ({"keeper": "Ada", "stairs": 2, "height": 1.5, "haunted": 1}, 1, 3 / 4),
        ({"keeper": None, "stairs": None, "height": None, "haunted": None}, 1, 0),
        ({"keeper": ["Ada"], "stairs": [2], "height": {"height": 1}, "haunted": []}, 1, 0),
    ],
)
def test_shaped_components_by_hand(answer: object, keys: float, types: float) -> None:
    assert all_scores(json.dumps(answer)) == (1.0, pytest.approx(keys), pytest.approx(types), 0.0)


def test_infinity_in_disguise_is_no_number() -> None:
    assert all_scores(GOOD.replace("31.5", "1e999")) == (1.0, 1.0, 0.75, 0.0)


@pytest.mark.parametrize(
    ("change", "keys", "types"),
    [
        ({}, 1, 1),
        ({"stairs": 90}, 1, 1),
        ({"rooms": ["kitchen"]}, 1, 1),
    ],
)
def test_rich_answers_pass(change: dict[str, object], keys: float, types: float) -> None:
    assert all_scores(json.dumps({**RICH_GOOD, **change}), RICH) == (1.0, keys, types, 1.0)


@pytest.mark.parametrize(
    ("change", "keys", "types"),
    [
        ({"stairs": 9}, 1, 1),  # below the range
        ({"stairs": 91}, 1, 1),
        ({"style": "baroque"}, 1, 1),  # not in the enum
        ({"rooms": []}, 1, 1),
        ({"rooms": ["kitchen", "kitchen"]}, 1, 1),  # repeated items
        ({"rooms": ["kitchen", " Kitchen."]}, 1, 1),
        ({"rooms": list("abcdef")}, 1, 1),  # too many
        ({"rooms": ["kitchen", ""]}, 1, 1),
        ({"rooms": ["kitchen", "<text>"]}, 1, 1),
        ({"rooms": ["kitchen", 3]}, 1, 4 / 5),
        ({"rooms": "kitchen"}, 1, 4 / 5),
        ({"garden": {"hedge": "hawthorn"}}, 6 / 7, 4 / 5),
        ({"garden": {"hedge": "hawthorn", "benches": 2, "pond": True}}, 7 / 8, 1),
        ({"garden": {"hedge": "hawthorn", "benches": 2.0}}, 1, 4 / 5),
        ({"garden": {"hedge": " ", "benches": 2}}, 1, 1),
        ({"garden": "hawthorn"}, 5 / 7, 4 / 5),
    ],
)
def test_rich_faults_fail(change: dict[str, object], keys: float, types: float) -> None:
    scores = all_scores(json.dumps({**RICH_GOOD, **change}), RICH)
    assert scores == (1.0, pytest.approx(keys), pytest.approx(types), 0.0)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "   ",
        "...",
        "<>",
        "___",
        "keeper",
        "Keeper",
        "KEEPER.",
        "string",
        "<string>",
        "integer",
        "text",
        "<text>",
        "(text)",
        "string value",
        "your name here",
        "Insert keeper here",
        "the keeper",
        "keeper name",
        "Keeper of the lighthouse",
        "lighthouse keeper",
        "keeper 1",
        "text1",
        "null",
        "N/A",
        "unknown",
        "example",
        "placeholder",
        "lorem ipsum",
        "Make up a lighthouse",
        "\uff4b\uff45\uff45\uff50\uff45\uff52",  # full-width "keeper"
    ],
)
def test_a_string_that_says_nothing_new_never_passes(value: str) -> None:
    answer = json.dumps({"keeper": value, "stairs": 2, "height": 1.5, "haunted": True})
    assert all_scores(answer) == (1.0, 1.0, 1.0, 0.0)


def test_the_same_string_everywhere_never_passes() -> None:
    prompt = make_prompt(Field("keeper", "string"), Field("owner", "string"))
    assert all_scores('{"keeper": "Ada", "owner": "Ada"}', prompt)[3] == 0.0
    assert all_scores('{"keeper": "Ada", "owner": "ada."}', prompt)[3] == 0.0
    assert all_scores('{"keeper": "Ada", "owner": "Ben"}', prompt)[3] == 1.0


def test_enum_values_stand_in_the_prompt_and_pass_all_the_same() -> None:
    prompt = make_prompt(Field("style", "enum", options=("text", "lighthouse")))
    assert all_scores('{"style": "lighthouse"}', prompt)[3] == 1.0


def names(field: Field) -> set[str]:
    return {field.name}.union(*(names(child) for child in field.fields))


def test_vocabularies_of_the_splits_are_disjoint() -> None:
    fields, entities, options = {}, {}, {}
    for split, themes in THEMES.items():
        all_fields = [f for theme in themes for f in theme.strings + theme.others + theme.rich]
        fields[split] = set().union(*(names(field) for field in all_fields))
        entities[split] = {entity for theme in themes for entity in theme.entities}
        options[split] = {option for field in all_fields for option in field.options}
        # All of it is vocabulary that the echo rule and the baselines rely on.
        assert len(entities[split]) >= 25
        assert len(fields[split]) >= 70
        assert len(options[split]) >= 15
    for one, other in combinations(SPLITS, 2):
        for vocabulary in (fields, entities, options):
            assert not vocabulary[one] & vocabulary[other]


def test_drawn_prompts_of_the_splits_are_disjoint() -> None:
    task = StructuredOutput(tier=2)
    keys, entities, ids = {}, {}, {}
    for split in SPLITS:
        prompts = task.prompts(split, 300, seed=3)
        keys[split] = {key for p in prompts for key in p.columns["schema"]["properties"]}
        entities[split] = {p.columns["entity"] for p in prompts}
        ids[split] = {p.id for p in prompts}
        assert {p.columns["style"] for p in prompts} == set(STYLES)
    for one, other in combinations(SPLITS, 2):
        for drawn in (keys, entities, ids):
            assert not drawn[one] & drawn[other]


@pytest.mark.parametrize("tier", [1, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_a_thousand_distinct_prompts(tier: int, split: str) -> None:
    prompts = StructuredOutput(tier).prompts(split, 1000, seed=0)
    assert len({p.id for p in prompts}) == len({p.messages[0]["content"] for p in prompts}) == 1000


def test_prompts_depend_on_the_seed_alone_and_extend() -> None:
    task = StructuredOutput()
    prompts = list(task.prompts("train", 50, seed=1))
    assert prompts == list(StructuredOutput().prompts("train", 50, seed=1))
    assert prompts == list(task.prompts("train", 80, seed=1))[:50]
    other = {prompt.id for prompt in task.prompts("train", 50, seed=2)}
    assert len(other & {prompt.id for prompt in prompts}) < 5


@pytest.mark.parametrize("tier", range(3))
def test_tiers_have_the_fields_that_they_promise(tier: int) -> None:
    fewest, most = TIERS[tier].num_fields
    seen = set()
    for prompt in StructuredOutput(tier).prompts("train", 200, seed=0):
        properties = prompt.columns["schema"]["properties"]
        assert fewest <= len(properties) <= most
        kinds = [child["type"] for child in properties.values() if "enum" not in child]
        assert kinds.count("string") >= 1
        seen |= {"enum" if "enum" in child else child["type"] for child in properties.values()}
        bounded = any("minimum" in child for child in properties.values())
        assert bounded == (tier == 2 and "integer" in kinds)
        # The prompt shows all that is asked for.
        text = prompt.messages[0]["content"]
        assert prompt.columns["block"] in text
        assert all(key in text for key in properties)
    flat = {"string", "integer", "number", "boolean"}
    assert seen == (flat | {"enum", "array", "object"} if tier == 2 else flat)


@pytest.mark.parametrize("tier", range(3))
@pytest.mark.parametrize("baseline", ["constant", "schema_echo", "schema_echo_json"])
def test_no_baseline_passes(tier: int, baseline: str) -> None:
    task = StructuredOutput(tier)
    answer = task.baselines()[baseline]
    scores = [task.score(p, answer(p)) for p in task.prompts("validation", 100, seed=0)]
    assert {score["pass"] for score in scores} == {0.0}
    if baseline == "schema_echo_json":  # it fails by copying alone
        assert {score["keys"] for score in scores} == {score["types"] for score in scores} == {1.0}


@pytest.mark.parametrize(
    ("tier", "digest"),
    [(0, "72ff1357d3e24aa9"), (1, "e2dcde021802acfd"), (2, "5819cb6a8b90046a")],
)
def test_prompts_golds_and_scores_of_the_plain_tiers_never_change(tier: int, digest: str) -> None:
    """Published figures rest on them: a new digest asks for new figures."""
    task = StructuredOutput(tier)
    columns = ("schema", "block", "format", "style", "entity", "row_hash")
    found = hashlib.sha256()
    for p in task.prompts("train", 150, seed=0):
        gold = task.gold(p)
        assert gold is not None
        echoes = [dict(task.score(p, answer(p))) for answer in task.baselines().values()]
        row = [p.id, p.task, p.messages, {key: p.columns[key] for key in columns}, gold]
        found.update(json.dumps([*row, dict(task.score(p, gold)), echoes]).encode())
    assert found.hexdigest()[:16] == digest


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"formats=\('toml',\): name each once"):
        StructuredOutput(formats=("toml",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"formats=\(\)"):
        StructuredOutput(formats=())
    with pytest.raises(ValueError, match="primary='keys': choose from"):
        StructuredOutput(primary="keys")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tier=7: choose from 0 to 4"):
        StructuredOutput(tier=7)
    with pytest.raises(ValueError, match="split='dev'"):
        StructuredOutput().prompts("dev", 1, seed=0)


def test_a_small_vocabulary_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    theme = Theme(entities=("dog",), strings=(Field("name", "string"),), others=(), rich=())
    tier = Tier(num_fields=(1, 1), num_strings=(1, 1))
    monkeypatch.setattr(structured, "THEMES", {"train": (theme,)})
    monkeypatch.setattr(structured, "TIERS", (tier,))
    task = StructuredOutput(tier=0)
    assert len(task.prompts("train", len(STYLES), seed=0)) == len(STYLES)
    with pytest.raises(NotEnoughPromptsError, match="take a tier above 0") as caught:
        task.prompts("train", 6, seed=0)
    assert caught.value.num_available == len(STYLES) == 5
