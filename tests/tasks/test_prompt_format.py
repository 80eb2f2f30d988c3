"""How questions are put, where answers are found, and what form alone can earn."""

from __future__ import annotations

import time

import pytest

from tropism.tasks.prompt_format import SYSTEM_FOR_TAGS, PromptFormat

CHAT, RAW, TAGS = (PromptFormat(style=style) for style in ("chat", "raw", "tags"))
WHOLE = "<think>\n2 and 2\n</think>\n<answer>\n4\n</answer>"


def ask(prompt_format: PromptFormat, question: str = "2+2?"):
    return prompt_format.prompt(id="p", task="t", question=question, columns={"answer": "4"})


def test_chat_is_one_user_message_behind_a_system_message_if_there_is_one() -> None:
    assert ask(CHAT).messages == ({"role": "user", "content": "2+2?"},)
    assert ask(PromptFormat(system="Be brief.")).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    )
    assert ask(CHAT).columns == {"answer": "4"}
    assert (ask(CHAT).id, ask(CHAT).task, ask(CHAT).text) == ("p", "t", None)


def test_tags_are_explained_unless_a_system_message_says_otherwise() -> None:
    assert ask(TAGS).messages[0] == {"role": "system", "content": SYSTEM_FOR_TAGS}
    own = PromptFormat(style="tags", system="Use the tags.")
    assert ask(own).messages[0]["content"] == "Use the tags."
    assert len(ask(PromptFormat(style="tags", system="")).messages) == 1  # some templates have none


def test_the_example_of_the_system_message_has_the_form_that_it_asks_for() -> None:
    example = SYSTEM_FOR_TAGS[SYSTEM_FOR_TAGS.index("<think>") :]
    assert TAGS.scores(example) == {"format": 1.0, "tag_count": 1.0}


def test_raw_text_has_the_question_in_its_template_as_it_is() -> None:
    assert ask(RAW).text == "Question: 2+2?\nAnswer:"
    assert ask(RAW, "{x} \\1 {question}?").text == "Question: {x} \\1 {question}?\nAnswer:"
    twice = PromptFormat(style="raw", template="{question}\n{question}\n")
    assert ask(twice).text == "2+2?\n2+2?\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "json"}, "style='json': choose from"),
        ({"style": "raw", "system": "x"}, "style='raw' has no system message"),
        ({"style": "raw", "template": "Q:"}, r"template='Q:' lacks \{question\}"),
    ],
)
def test_what_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptFormat(**settings)


def test_without_tags_all_of_a_completion_is_judged_and_form_earns_nothing() -> None:
    for prompt_format in (CHAT, RAW):
        assert prompt_format.answer(WHOLE) == WHOLE
        assert prompt_format.answer("") == ""
        assert prompt_format.components == ()
        assert prompt_format.scores(WHOLE) == {}


def test_the_whole_form_with_blanks_around_it() -> None:
    for text in (WHOLE, f"\n {WHOLE}\n\n"):
        assert TAGS.answer(text) == "4"
        assert TAGS.scores(text) == {"format": 1.0, "tag_count": 1.0}
    assert tuple(TAGS.scores("")) == TAGS.components == ("format", "tag_count")


def test_several_lines_in_a_block() -> None:
    text = "<think>\na\n\nb <b>c</b>\n</think>\n<answer>\n1 2\n3 4\n</answer>"
    assert TAGS.answer(text) == "1 2\n3 4"
    assert TAGS.scores(text)["format"] == 1.0


@pytest.mark.parametrize(
    ("text", "answer", "tag_count"),
    [
        ("", None, 0.0),
        ("4", None, 0.0),
        ("<answer>4</answer>", "4", 0.5),
        ("The answer: <answer>\n4\n</answer>", "4", 0.5),
        # Text outside of the tags
        (f"Sure! {WHOLE}", "4", 1.0),
        (f"{WHOLE}\nI hope this helps.", "4", 1.0),
        (WHOLE.replace("</think>\n", "</think>\nso\n"), "4", 1.0),
        # Tags on lines with something else
        ("<think>2 and 2</think><answer>4</answer>", "4", 1.0),
        (WHOLE.replace("</think>\n", "</think>\n\n"), "4", 1.0),
        # Blank blocks: tags alone are no answer and no form
        ("<think>\n\n</think>\n<answer>\n\n</answer>", None, 1.0),
        ("<think>\n \n</think>\n<answer>\n4\n</answer>", "4", 1.0),
        ("<think>\nx\n</think>\n<answer>\n\t\n</answer>", None, 1.0),
        ("<think>\n</think>\n<answer>\n</answer>", None, 1.0),
        # Two guesses, also where the second block is not whole
        (WHOLE + "\n<answer>\n5\n</answer>", None, 0.5),
        (WHOLE + "<answer>5", None, 0.75),
        (WHOLE + "5</answer>", None, 0.75),
        ("<answer>5" + WHOLE, None, 0.75),
        (WHOLE + WHOLE, None, 0.0),
        # Nested tags
        ("<answer>5 <answer>4</answer></answer>", None, 0.0),
        ("<answer><think>x</think>4</answer>", None, 1.0),
        ("<answer>4</think></answer>", None, 0.75),
        ("<think>\n<answer>\n4\n</answer>\n</think>", None, 1.0),
        ("<think>maybe <answer>4</answer>", None, 0.75),
        ("maybe <answer>4</answer> or not</think>", None, 0.75),
        # Order
        ("</answer>4<answer>", None, 0.5),
        ("<answer>\n4\n</answer>\n<think>\n2 and 2\n</think>", "4", 1.0),
        ("</think></answer><answer><think>", None, 1.0),
        # Other spellings are other tags
        ("<Think>\nx\n</Think>\n<Answer>\n4\n</Answer>", None, 0.0),
        ("<answer >4</answer >", None, 0.0),
        # Cut at the limit
        ("<think>\n2 and 2\n</think>\n<answer>\n4", None, 0.75),
        ("<think>\n2 and", None, 0.25),
    ],
)
def test_whatever_is_not_the_whole_form(text: str, answer: str | None, tag_count: float) -> None:
    assert TAGS.answer(text) == answer
    assert TAGS.scores(text) == {"format": 0.0, "tag_count": tag_count}


@pytest.mark.parametrize(
    "spam",
    [
        "<think>",
        "<answer>",
        "<answer>4",
        "<answer>4</answer>",
        "<think>\n</think>\n<answer>\n",
        "\n</think>\n<answer>\n",
        WHOLE + "\n",
    ],
)
def test_tags_up_to_the_limit_earn_nothing_and_cost_no_time(spam: str) -> None:
    text = "<think>\n" + spam * 20_000
    started = time.process_time()
    scores = TAGS.scores(text)
    assert TAGS.answer(text) is None
    assert time.process_time() - started < 0.5  # by patterns with a gap: minutes
    assert scores["format"] == 0.0
    assert scores["tag_count"] <= 0.25


@pytest.mark.parametrize("text", ["4", "-1.5", "1 2\n3 4", "a<b", "{}"])
@pytest.mark.parametrize("prompt_format", [CHAT, RAW, TAGS], ids=lambda f: f.style)
def test_gold_is_read_back(prompt_format: PromptFormat, text: str) -> None:
    written = prompt_format.gold(text, reasoning="so it is")
    assert prompt_format.answer(written).strip() == text
    assert all(value == 1.0 for value in prompt_format.scores(written).values())


def test_raw_gold_is_apart_from_what_is_before_it() -> None:
    assert RAW.gold("4", reasoning="") == " 4"
    assert PromptFormat(style="raw", template="{question}\n").gold("4", reasoning="") == "4"
