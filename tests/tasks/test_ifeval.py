"""IFEval: each kind of instruction by hand, what cannot be checked here, empty answers."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from tropism.tasks import ifeval
from tropism.tasks.ifeval import NEEDS_NLTK_DATA, IFEval, missing_checks
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

pytest.importorskip("if_verifiable", reason="needs if-verifiable")

DATA = Path(
    os.environ.get("TROPISM_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data"
)
needs_data = pytest.mark.skipif(not (DATA / "ifeval").is_dir(), reason=f"no IFEval in {DATA}")

ENGLISH = "The quiet harbour lies below the hill and the boats come home when it rains"


def prompt_of(*instructions: tuple[str, dict[str, Any]]) -> Prompt:
    return Prompt(
        id="ifeval-1",
        task="ifeval",
        messages=({"role": "user", "content": "Write."},),
        columns={
            "prompt": "Write.",
            "instruction_id_list": [name for name, _ in instructions],
            "kwargs": [kwargs for _, kwargs in instructions],
        },
    )


def is_followed(answer: str, name: str, kwargs: dict[str, Any]) -> bool:
    scores = IFEval().score(prompt_of((name, kwargs)), answer)
    assert scores["prompt_strict"] == scores["instruction_strict"]
    return scores["prompt_strict"] == 1.0


SECTIONS = {"section_spliter": "Part", "num_sections": 2}
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("punctuation:no_comma", {}, "One two", "One, two"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "a b c", "a b"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "a b", "a b c"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A dog", "A cat"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "cat and dog", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat cat",
     "cat"),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"},
     "qq", "q"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
    ("detectable_format:title", {}, "<<On boats>>\ntext", "On boats"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:multiple_sections", SECTIONS, "Part 1\nx\nPart 2\ny", "Part 1\nx"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "x"),
    ("startend:end_checker", {"end_phrase": "The end."}, "x. The end.", "The end. x"),
    ("startend:quotation", {}, '"x"', "x"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Say hi. Hi.", "Hi."),
    ("combination:two_responses", {}, "yes\n******\nno", "yes\n******\nyes"),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("language:response_language", {"language": "de"},
     "Der ruhige Hafen liegt am Hügel und die Boote kommen heim, wenn es regnet.", ENGLISH),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\nso b", "a\n\nb so"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kwargs", "right", "wrong"), CASES)
def test_each_instruction(name: str, kwargs: dict[str, Any], right: str, wrong: str) -> None:
    assert is_followed(right, name, kwargs)
    assert not is_followed(wrong, name, kwargs)
    assert not is_followed("", name, kwargs)
    assert not is_followed("  \n", name, kwargs)


def test_every_instruction_is_tested_or_named_as_needing_data() -> None:
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    assert {name for name, *_ in CASES} | set(NEEDS_NLTK_DATA) == INSTRUCTION_DICT.keys()


def test_a_thousand_brackets_are_no_json() -> None:
    assert not is_followed("[" * 1000, "detectable_format:json_format", {})


def test_shares_of_several_instructions() -> None:
    prompt = prompt_of(
        ("punctuation:no_comma", {}),
        ("keywords:existence", {"keywords": ["cat"], "num_words": None}),
        ("startend:quotation", {}),
    )
    scores = IFEval().score(prompt, "cat")
    assert scores == {"prompt_strict": 0.0, "instruction_strict": pytest.approx(2 / 3)}
    assert IFEval().score(prompt, '"cat"') == {"prompt_strict": 1.0, "instruction_strict": 1.0}


def test_languages_are_told_the_same_way_every_time() -> None:
    """langdetect draws at random; here its estimates are the same each time."""
    import langdetect

    assert is_followed(ENGLISH, "language:response_language", {"language": "en"})
    assert len({str(langdetect.detect_langs("per a son")) for _ in range(10)}) == 1


def test_with_tags_only_the_answer_block_is_judged() -> None:
    tags = PromptFormat(style="tags")
    task = IFEval(prompt_format=tags)
    prompt = prompt_of(("punctuation:no_comma", {}))
    assert task.score(prompt, tags.gold("One two", "Well, well."))["prompt_strict"] == 1.0
    assert task.score(prompt, "One two")["prompt_strict"] == 0.0
    assert task.components == ("prompt_strict", "instruction_strict", "format", "tag_count")


@needs_data
def test_prompts_that_cannot_be_checked_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ifeval, "missing_checks", lambda: NEEDS_NLTK_DATA)
    task = IFEval(data=str(DATA))
    counts = {
        "length_constraints:number_sentences": 46,
        "change_case:capital_word_frequency": 20,
    }
    assert task.left_out() == counts
    with pytest.raises(NotEnoughPromptsError, match="NLTK data that 64 need") as caught:
        task.prompts("test", 541, seed=0)
    assert caught.value.num_available == 477
    with caplog.at_level(logging.WARNING):
        prompts = task.prompts("test", 477, seed=0)
    told = (
        "64 of 541 prompts left out, 477 asked: NLTK data is missing for "
        "change_case:capital_word_frequency in 20, length_constraints:number_sentences in 46 "
        "(python -m nltk.downloader punkt_tab)"
    )
    assert told in caplog.text
    assert [info.note for info in task.data_info()] == [told]
    assert sum(prompt.columns["num_instructions"] for prompt in prompts) == 710
    names = {name for prompt in prompts for name in prompt.columns["instruction_id_list"]}
    assert names == {name for name, *_ in CASES}


@needs_data
def test_the_whole_set_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    task = IFEval(data=str(DATA))
    num = 541 if not missing_checks() else 477
    prompts = task.prompts("test", num, seed=0)
    assert prompts[0] == task.prompts("test", 1, seed=0)[0]
    assert len({prompt.id for prompt in prompts}) == num
    assert task.data_info()[0].num_rows == 541
    followed = [task.score(prompt, "My answer is yes.") for prompt in prompts]
    assert 0.0 < sum(float(s["prompt_strict"] or 0) for s in followed) / num < 0.3
    assert all(set(task.score(prompt, "").values()) == {0.0} for prompt in prompts)


@needs_data
@pytest.mark.parametrize("split", ["train", "validation"])
def test_it_is_for_tests_only(split: Any) -> None:
    task = IFEval(data=str(DATA))
    with pytest.raises(NotEnoughPromptsError, match="it is a benchmark"):
        task.prompts(split, 1, seed=0)
    assert task.prompts(split, 0, seed=0) == []


def test_an_instruction_without_a_check_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ifeval").mkdir()
    row = {"key": 7, "prompt": "p", "instruction_id_list": ["en:tone:kind"], "kwargs": [{}]}
    (tmp_path / "ifeval" / "input_data.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"key 7: if-verifiable has no checks for \['tone:kind'\]"):
        IFEval(data=str(tmp_path)).prompts("test", 1, seed=0)
