"""Contamination: planted leaks are found, and no template of a shipped task is taken for one."""

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tropism.decontamination import ENOUGH_FOR_TEMPLATE, HeldOutTexts, question_text
from tropism.tasks.base import Split, Task
from tropism.tasks.math import GSM8K
from tropism.tasks.reasoning import Reasoning
from tropism.tasks.skills import Skills
from tropism.tasks.structured import TIERS, StructuredOutput
from tropism.types import Prompt

QUESTION = (
    "A baker sells 14 loaves before noon and twice as many after lunch, at three coins each; how "
    "many coins does she count when the shop closes?"
)
LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopabcdef")
VOCABULARY = [
    hashlib.sha256(str(i).encode()).hexdigest()[:7].translate(LETTERS) for i in range(4000)
]


def prompt(name: str, text: str, system: str | None = None) -> Prompt:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Prompt(id=name, task="t", messages=tuple(messages))


def text(seed: str, num: int) -> str:
    return " ".join(random.Random(seed).choices(VOCABULARY, k=num))


def leaks(train: Sequence[str], held_out: Sequence[str]) -> list[tuple[str, str]]:
    index = HeldOutTexts({"test of t": [prompt(f"h{i}", each) for i, each in enumerate(held_out)]})
    found = index.leaks([prompt(f"t{i}", each) for i, each in enumerate(train)])
    assert all(leak.place == "test of t" for leak in found)
    return [(leak.prompt_id, leak.held_out_id) for leak in found]


BACKGROUND = [text(f"background/{i}", 40) for i in range(200)]

# -- planted leaks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planted",
    [
        QUESTION,
        QUESTION.upper().replace(",", "  -  "),
        f"{text('before', 60)} {QUESTION} {text('after', 60)}",
        f"Solve this: {QUESTION} Answer with a number.",
        # A paraphrase that keeps 13 words in a row, "14 loaves ... three".
        "In a village, someone sells 14 loaves before noon and twice as many after lunch, at "
        "three pence. What does that make?",
        "Ｗｉｄｅ " + QUESTION.replace("14", "１４"),
    ],
)
def test_a_planted_leak_is_found(planted: str) -> None:
    assert leaks([*BACKGROUND, planted], [text("other", 30), QUESTION]) == [("t200", "h1")]


def test_twelve_common_words_are_none_and_thirteen_are() -> None:
    shared = QUESTION.split()
    for num, found in ((12, []), (13, [("t200", "h0")])):
        planted = " ".join([text("a", 9), *shared[3 : 3 + num], text("b", 9)])
        assert leaks([*BACKGROUND, planted], [QUESTION]) == found


def test_short_texts_leak_by_being_equal() -> None:
    train = ["what is 3+4?", "What is\n 3 + 5?", "What is 3-4?"]
    assert leaks(train, ["What is 3+4?", "what is 3 + 5?", "What is 3*4?"]) == [
        ("t0", "h0"),
        ("t1", "h1"),
    ]


def test_a_leak_that_is_repeated_a_few_times_is_no_template() -> None:
    train = [*BACKGROUND, *(f"{text(str(i), 5)} {QUESTION}" for i in range(5))]
    assert [train_id for train_id, _ in leaks(train, [QUESTION])] == [
        f"t{i + 200}" for i in range(5)
    ]


def test_rows_of_few_different_words_are_none() -> None:
    grid = " ".join(random.Random(0).choices("0123", k=30))
    assert leaks([*BACKGROUND, f"{text('x', 20)} {grid}"], [f"{grid} {text('y', 20)}"]) == []


def test_system_messages_do_not_count_and_raw_prompts_do() -> None:
    index = HeldOutTexts({"validation": [prompt("h", "Name a fruit.", system=QUESTION)]})
    assert index.leaks([prompt("t", "Name a bird.", system=QUESTION)]) == []
    raw = Prompt(id="raw", task="t", text="name a  fruit.")
    assert [leak.held_out_id for leak in index.leaks([raw])] == ["h"]


# -- templates ------------------------------------------------------------------------------------

TEMPLATE = (
    "You are given the name of a town and shall say in which of the four parts of the country it "
    "lies. The town: {town}. Think about rivers and hills first, and then write on a last line of "
    "its own the word north, east, south or west and nothing else besides."
)


def test_what_all_prompts_say_is_no_leak() -> None:
    train = [TEMPLATE.format(town=VOCABULARY[i]) for i in range(200)]
    held_out = [TEMPLATE.format(town=VOCABULARY[1000 + i]) for i in range(5)]
    assert leaks(train, held_out) == []
    planted = f"{TEMPLATE.format(town='Ulm')} {QUESTION}"
    assert leaks([*train, planted], [*held_out, QUESTION]) == [("t200", "h5")]


def test_words_of_the_template_do_not_complete_a_run_of_thirteen() -> None:
    opening = " ".join(VOCABULARY[:9])
    train = [f"{opening} {text(f'own/{i}', 30)}" for i in range(60)]
    for num, found in ((12, []), (13, [("t60", "h0")])):
        shared = text("shared", num)
        planted = f"{opening} {shared} {text('then', 9)}"
        held_out = f"{opening} {shared} {text('otherwise', 9)}"
        assert leaks([*train, planted], [held_out]) == found


def test_a_small_pool_is_given_more_prompts_to_learn_its_template_from() -> None:
    train = [prompt(f"t{i}", TEMPLATE.format(town=VOCABULARY[i])) for i in range(4)]
    index = HeldOutTexts({"test": [prompt("h", TEMPLATE.format(town="Ulm"))]})
    assert len(index.leaks(train)) == 4
    more = [prompt(f"m{i}", TEMPLATE.format(town=VOCABULARY[i + 9])) for i in range(40)]
    assert index.leaks(train, lambda: more) == []
    train.append(prompt("leak", QUESTION))
    index = HeldOutTexts(
        {"test": [prompt("h", TEMPLATE.format(town="Ulm")), prompt("q", QUESTION)]}
    )
    assert [leak.prompt_id for leak in index.leaks(train, lambda: more)] == ["leak"]


def test_more_prompts_are_drawn_only_on_suspicion() -> None:
    def more() -> Sequence[Prompt]:
        pytest.fail("nothing was suspicious")

    index = HeldOutTexts({"test": [prompt("h", QUESTION)]})
    assert index.leaks([prompt("t", BACKGROUND[0])], more) == []


def test_order_and_repetition_of_the_prompts_change_nothing() -> None:
    train = [*BACKGROUND, QUESTION, f"{text('q', 20)} {QUESTION}"]
    held_out = [text("other", 30), QUESTION]
    expected = sorted(leaks(train, held_out))
    assert expected == [("t200", "h1"), ("t201", "h1")]
    assert sorted((t, "h1") for t, _ in leaks(train, held_out[::-1])) == expected


# -- shipped tasks --------------------------------------------------------------------------------

SHIPPED: dict[str, Callable[[], Task]] = {
    "skills": Skills,
    **{
        f"structured-{tier}": lambda tier=tier: StructuredOutput(tier) for tier in range(len(TIERS))
    },  # type: ignore[misc]
    **{
        dataset: lambda dataset=dataset: Reasoning(dataset)  # type: ignore[misc]
        for dataset in (
            "chain_sum",
            "basic_arithmetic",
            "calendar_arithmetic",
            "gcd",
            "knights_knaves",
            "leg_counting",
            "spell_backward",
            "mini_sudoku",
            "syllogism",
            "word_sorting",
        )
    },
}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("num", [12, 300])
def test_nothing_of_a_shipped_task_is_taken_for_a_leak(name: str, num: int) -> None:
    task = SHIPPED[name]()
    splits: tuple[Split, ...] = ("validation", "test")
    index = HeldOutTexts({split: task.prompts(split, 64, 0) for split in splits})
    train = task.prompts("train", num, 0)
    assert index.leaks(train, partial(task.prompts, "train", ENOUGH_FOR_TEMPLATE, 0)) == []
    # And what is one is still found in it.
    held_out = HeldOutTexts({"benchmark": [prompt("q", QUESTION)]})
    planted = prompt("planted", f"{question_text(train[0])}\n{QUESTION}")
    assert [leak.prompt_id for leak in held_out.leaks([*train, planted])] == ["planted"]


def test_gsm8k_has_a_few_questions_that_are_nearly_another_of_its_test_set() -> None:
    """Published training sets do: these were read, and are variants with other numbers."""
    folder = os.environ.get("TROPISM_DATA") or Path(__file__).resolve().parents[2] / "shared/data"
    if not (Path(folder) / "gsm8k").is_dir():
        pytest.skip("needs the data of GSM8K: set TROPISM_DATA")
    task = GSM8K(data=str(folder))
    index = HeldOutTexts({"test": task.prompts("test", 1319, 0)})
    train = task.prompts("train", 6000, 0)
    assert len(index.leaks(train)) <= 6
    question = question_text(task.prompts("test", 9, 0)[8])
    planted = prompt("planted", f"{question_text(train[0])}\nNow this one.\n{question}")
    assert index.leaks([*train, planted])[-1].prompt_id == "planted"
