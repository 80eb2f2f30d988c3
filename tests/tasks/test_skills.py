"""The micro-skills: gold answers, wrong ones, splits, determinism."""

from __future__ import annotations

import json
import random

import pytest

from tropism.tasks.skills import RECORD, SKILLS, Skills, split_of
from tropism.types import Prompt

SPLITS = ("train", "validation", "test")


def ask(skill: str, question: str, answer: str) -> Prompt:
    return Prompt(
        id="p",
        task="skills",
        messages=({"role": "user", "content": question},),
        columns={"skill": skill, "domain": SKILLS[skill].domain, "answer": answer},
    )


@pytest.fixture(scope="module")
def validation() -> list[Prompt]:
    return list(Skills().prompts("validation", 400, seed=0))


@pytest.mark.parametrize(
    ("skill", "question", "answer"),
    [
        ("add", "34+58=", "92"),
        ("subtract", "58-34=", "24"),
        ("larger", "larger of 7 and 31", "31"),
        ("reverse", "reverse tilo", "olit"),
        ("sort", "sort dbca", "abcd"),
        ("count", "count a in banana", "3"),
        ("choice", "3+4? A 6 B 7 C 9", "B"),
        ("record", "name=bob age=7", '{"name":"bob","age":7}'),
        ("bracket", "close ([{", "}])"),
        ("evaluate", "x=3;x=x+2;x", "5"),
    ],
)
def test_the_documented_samples_score_one(skill: str, question: str, answer: str) -> None:
    task, prompt = Skills(), ask(skill, question, answer)
    assert task.score(prompt, answer) == {"format": 1.0, "accuracy": 1.0}
    assert task.score(prompt, f" {answer}\n") == {"format": 1.0, "accuracy": 1.0}
    assert task.score(prompt, f"the answer is {answer}") == {"format": 0.0, "accuracy": 0.0}


def _solve(skill: str, question: str) -> str:
    """The answer of a terse question, found another way than the task makes it."""
    words = question.split()
    if skill in ("add", "subtract"):
        return str(eval(question.rstrip("=")))
    if skill == "larger":
        return str(max(int(words[2]), int(words[4])))
    if skill == "reverse":
        return "".join(reversed(words[1]))
    if skill == "sort":
        return "".join(
            letter for letter in sorted(set(words[1])) for _ in range(words[1].count(letter))
        )
    if skill == "count":
        return str(sum(letter == words[1] for letter in words[3]))
    if skill == "choice":
        options = dict(zip(words[2::2], words[1::2], strict=True))
        return options[str(eval(words[0].rstrip("?")))]
    if skill == "record":
        (key, text), (other, number) = (word.split("=") for word in words)
        return f'{{"{key}":"{text}","{other}":{number}}}'
    if skill == "bracket":
        marks = words[1]
        for _ in marks:
            for pair in ("()", "[]", "{}"):
                marks = marks.replace(pair, "")
        return marks[::-1].translate(str.maketrans("([{", ")]}"))
    scope: dict[str, int] = {}
    *lines, last = question.split(";")
    exec("\n".join(lines), scope)
    return str(scope[last])


@pytest.mark.parametrize("skill", SKILLS)
def test_answers_agree_with_an_independent_solver(skill: str) -> None:
    rng = random.Random(3)
    for _ in range(300):
        exercise = SKILLS[skill].make(rng)
        if skill == "choice":
            marks = exercise.wordings[0].split()
            assert len(set(marks[2::2])) == 3
        assert _solve(skill, exercise.wordings[0]) == exercise.answer
        assert len(exercise.answer) <= 24
        assert SKILLS[skill].form.fullmatch(exercise.answer)


def test_gold_scores_one_and_everything_else_zero(validation: list[Prompt]) -> None:
    task = Skills()
    golds = {prompt.columns["answer"] for prompt in validation}
    for prompt in validation:
        gold = prompt.columns["answer"]
        assert prompt.messages is not None
        assert task.score(prompt, gold) == {"format": 1.0, "accuracy": 1.0}
        for wrong in ("", " ", prompt.messages[0]["content"], gold + gold, gold + " x", "\x00"):
            assert task.score(prompt, wrong)["accuracy"] == 0.0, (prompt, wrong)
        assert task.score(prompt, "") == {"format": 0.0, "accuracy": 0.0}
        for other in golds - {gold}:
            assert task.score(prompt, other)["accuracy"] == 0.0, (prompt, other)


def test_form_without_accuracy() -> None:
    task = Skills()
    assert task.score(ask("add", "34+58=", "92"), "93") == {"format": 1.0, "accuracy": 0.0}
    assert task.score(ask("choice", "", "B"), "b") == {"format": 0.0, "accuracy": 0.0}
    assert task.score(ask("count", "", "3"), "٣") == {"format": 0.0, "accuracy": 0.0}
    assert task.score(ask("add", "", "92"), "092") == {"format": 1.0, "accuracy": 0.0}


@pytest.mark.parametrize(
    ("completion", "form", "accuracy"),
    [
        ('{"age": 7, "name": "bob"}', 1.0, 1.0),
        ('{"name":"bob","age":"7"}', 1.0, 0.0),
        ('{"name":"bob","name":"bob"}', 1.0, 0.0),
        ('{"name":"bob","age":8}', 1.0, 0.0),
        ('{"name":"bob","name":7}', 1.0, 0.0),
        ('{"name":"bob","age":7.0}', 0.0, 0.0),
        ('{"name":"bob","age":07}', 0.0, 0.0),
        ('{"name":"bob"}', 0.0, 0.0),
        ('{"name":"bob","age":7', 0.0, 0.0),
        ("{name:bob,age:7}", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ('{"name":"bob","age":' + "9" * 5_000 + "}", 0.0, 0.0),
    ],
)
def test_records(completion: str, form: float, accuracy: float) -> None:
    prompt = ask("record", "name=bob age=7", '{"name":"bob","age":7}')
    assert Skills().score(prompt, completion) == {"format": form, "accuracy": accuracy}
    if RECORD.fullmatch(completion):
        json.loads(completion)


def test_splits_are_disjoint_even_across_wordings() -> None:
    questions = {
        split: {
            (prompt.columns["skill"], *_numbers_and_words(prompt))
            for prompt in Skills().prompts(split, 1000, seed=5)
        }
        for split in SPLITS
    }
    assert not questions["train"] & questions["validation"]
    assert not questions["train"] & questions["test"]
    assert not questions["validation"] & questions["test"]


def _numbers_and_words(prompt: Prompt) -> tuple[str, ...]:
    """A question's content without its wording, so that rewordings compare equal."""
    assert prompt.messages is not None
    text = prompt.messages[0]["content"]
    skill, wordy = prompt.columns["skill"], prompt.columns["wording"] == "wordy"
    words = text.replace(",", "").split()
    if skill == "add":
        return tuple(words[1::2]) if wordy else tuple(text[:-1].split("+"))
    if skill == "subtract":
        return (words[3], words[1]) if wordy else tuple(text[:-1].split("-"))
    if skill == "larger":
        return tuple(words[1:]) if wordy else tuple(words[2::2])
    if skill in ("reverse", "sort"):
        return (words[0 if wordy else 1],)
    if skill == "count":
        return (words[2].rstrip(":"), words[3]) if wordy else (words[1], words[3])
    if skill == "choice":
        return tuple(text.removeprefix("pick ").replace(":", "?").split())
    if skill == "record":
        return tuple(words[1:]) if wordy else tuple(text.replace("=", " ").split())
    if skill == "bracket":
        return (words[1],)
    return (text.removeprefix("run "),)


def test_prompts_are_distinct_deterministic_and_balanced(validation: list[Prompt]) -> None:
    assert len({prompt.id for prompt in validation}) == 400
    assert len({prompt.messages[0]["content"] for prompt in validation if prompt.messages}) == 400
    assert list(Skills().prompts("validation", 400, seed=0)) == validation
    assert list(Skills().prompts("validation", 30, seed=0)) == validation[:30]
    assert list(Skills().prompts("validation", 400, seed=1)) != validation
    for start in range(0, 400, 10):
        assert {prompt.columns["skill"] for prompt in validation[start : start + 10]} == set(SKILLS)
    domains = {prompt.columns["domain"] for prompt in validation}
    assert domains == {"maths", "text", "choice", "structured", "code"}


def test_prompts_stay_the_same_across_versions_and_machines() -> None:
    prompts = Skills().prompts("train", 3, seed=0)
    assert [(p.id, p.messages[0]["content"] if p.messages else "") for p in prompts] == [
        ("skills/reverse/656a01b73a4f941c", "ifjg backwards"),
        ("skills/add/ada1290a730cb9bd", "add 5 and 15"),
        ("skills/choice/c34e1fc62189d2ba", "pick 7+8: A 15 B 16 C 14"),
    ]


def test_held_out_skills_do_not_appear() -> None:
    task = Skills(skills=("add", "sort"), name="known")
    prompts = task.prompts("test", 50, seed=0)
    assert {prompt.columns["skill"] for prompt in prompts} == {"add", "sort"}
    assert {prompt.task for prompt in prompts} == {"known"}
    assert all(prompt.id.startswith("known/") for prompt in prompts)


@pytest.mark.parametrize("skills", [("juggle",), (), ("add", "add")])
def test_bad_selections_are_refused(skills: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="name at least one skill"):
        Skills(skills=skills)


def test_running_out_of_questions_says_so() -> None:
    with pytest.raises(ValueError, match="ask for fewer prompts"):
        Skills(skills=("evaluate",)).prompts("validation", 100_000, seed=0)
    with pytest.raises(ValueError, match="choose from"):
        Skills().prompts("dev", 1, seed=0)  # type: ignore[arg-type]


def test_baselines_stay_low(validation: list[Prompt]) -> None:
    task = Skills()
    rates = {
        name: sum(task.score(prompt, answer(prompt))["accuracy"] or 0 for prompt in validation)
        / 400
        for name, answer in task.baselines().items()
    }
    assert rates["echo"] == 0.0
    assert 0.0 < rates["constant"] < 0.15
    constant = task.baselines()["constant"]
    assert all(task.score(prompt, constant(prompt))["format"] == 1.0 for prompt in validation)


def test_split_shares() -> None:
    splits = [split_of(f"{a}+{b}=") for a in range(100) for b in range(100)]
    shares = {split: splits.count(split) / len(splits) for split in SPLITS}
    assert shares == pytest.approx({"train": 0.8, "validation": 0.1, "test": 0.1}, abs=0.01)
