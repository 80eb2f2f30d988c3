"""GSM8K, MATH and a user's word problems: gold passes, nothing else does."""

import inspect
import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from tropism.scoring import score_completions
from tropism.tasks.math import GSM8K, MATH, WordProblems
from tropism.tasks.math_writing import number_of
from tropism.tasks.prompt_format import PromptFormat
from tropism.types import Prompt

TAGS = PromptFormat(style="tags")
WRAPPED = "<think>\nso\n</think>\n<answer>\n{}\n</answer>"


def problem(answer, question="How many?", solution=None):
    columns = {"question": question, "answer": answer, "solution": solution}
    return Prompt(id="p", task="t", text="q", columns=columns)


def scores(task, answer, completion, **columns):
    task.name = "t"
    (found,) = score_completions({"t": task}, problem(answer, **columns), [completion])
    return found["answered"], found["accuracy"]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("20 + 22 = 42.\n#### 42", (1, 1)),
        ("#### $42.00", (1, 1)),
        ("#### 42 eggs", (1, 1)),
        ("\\boxed{42}", (1, 1)),
        ("The answer is 42.", (1, 1)),
        ("42", (1, 1)),
        ("#### \\$42.00 per hour", (1, 1)),
        ("\\boxed{\\text{42 hours}}", (1, 1)),
        ("The total is 42.\n\n**Answer:** x = 42 eggs.", (1, 1)),
        ("#### 84/2", (1, 1)),
        ("#### 41", (1, 0)),
        ("#### -42", (1, 0)),
        ("#### 420", (1, 0)),
        ("#### 4", (1, 0)),  # cut
        ("", (0, 0)),
        ("####", (0, 0)),
        ("\\boxed{42", (0, 0)),
        ("20 + 22 = 42 in all,\nI think", (0, 0)),
        ("#### 41 or 42", (0, 0)),
        ("41 or 42", (0, 0)),
        ("1 2 3 42", (0, 0)),
        ("#### 42%", (0, 0)),
        ("#### 41\n#### 42", (0, 0)),
        ("\n".join(f"#### {i}" for i in range(100)), (0, 0)),
        ("The answer is not 41 but 42.", (0, 0)),
        ("The answer is either 41 or 42.", (0, 0)),
        ("The answer is between 41 and 42.", (0, 0)),
        ("#### 41-42", (0, 0)),
        ("#### about 42", (0, 0)),
        ("#### 41 = 42", (0, 0)),
        ("#### 20 + 22 = 42", (0, 0)),  # a number is asked for, not a calculation
        ("\\boxed{9^{9^{9^{9}}}}", (0, 0)),
        ("<answer>42</answer>", (0, 0)),  # tags that nobody asked for
    ],
)
def test_numbers(completion, expected):
    assert scores(GSM8K(), "42", completion) == expected


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("\\frac{1}{2}", "0.5", 1),
        ("\\frac{1}{2}", "\\dfrac12", 1),
        ("\\frac{1}{2}", "\\text{1/2}", 1),
        ("\\frac{1}{2}", "\\frac{1}{3}", 0),
        ("\\frac{1}{2}", "50\\%", 0),
        ("3\\frac{1}{2}", "3 1/2", 1),
        ("3\\frac{1}{2}", "3.5", 1),
        ("3\\frac{1}{2}", "\\frac{3}{2}", 0),
        ("x=5", "5", 1),
        ("5", "x = 5", 1),
        ("x=5", "y=5", 0),
        ("12", "12", 1),
        ("12", "12\\%", 0),
        ("12", "1 2", 0),
        ("10\\%", "10\\text{ percent}", 1),
        ("\\$32,\\!348", "32348", 1),
        ("10080", "10\\,080", 1),
        ("3", "3 \\text{ square units}", 1),
        ("3", "3 \\mathrm{~m}", 1),
        ("90^\\circ", "90°", 1),
        ("42", "41 \\text{ or } 42", 0),
        ("42", "1 2 3 42", 0),
        ("42", "41, 42", 0),
        ("42", "\\{41, 42\\}", 0),
        ("42", "41/42", 0),
        ("42", "41 = 42", 0),
        ("42", "x = 41 = 42", 0),
        ("42", "6 \\cdot 8 = 42", 0),
        ("42", "6 \\cdot 7 = 42", 1),
        ("42", "x \\ge 42", 0),
        ("42", "x \\ne 42", 0),
        ("42", "\\approx 42", 0),
        ("42", "42 \\pm 1", 0),
        ("1,2", "2 \\text{ and } 1", 1),
        ("1,2", "1, 2, 3", 0),
        ("1,2", "1", 0),
        ("(1,2)", "\\left( 1 ,\\ 2 \\right)", 1),
        ("(1,2)", "(2,1)", 0),
        ("\\{1,2,3\\}", "\\{3, 2, 1\\}", 1),
        ("(-\\infty, 2]", "x \\le 2", 1),
        ("(-\\infty, 2]", "x < 2", 0),
        ("(-\\infty, 2]", "(-∞, 2]", 1),
        ("x^2+1", "f(x) = 1 + x²", 1),
        ("2\\sqrt{5}", "2√5", 1),
        ("2\\sqrt{5}", "\\sqrt{5}", 0),
        ("\\pi", "3.14", 0),
        ("\\text{(C)}", "\\textbf{C}", 1),
        ("\\text{(C)}", "D", 0),
        ("\\text{Evelyn}", "evelyn", 1),
        ("\\text{even}", "\\text{even or odd}", 0),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}", 1),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}", 0),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "12", 0),
    ],
)
def test_boxed_answers(gold, answer, expected):
    assert scores(MATH(), gold, f"So it is \\boxed{{{answer}}}.") == (1, expected)


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        ("42", "\\boxed{41} or \\boxed{42}", (0, 0)),
        ("\\frac{1}{2}", "", (0, 0)),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{", (0, 0)),
        ("\\frac{1}{2}", "The answer is 1/2.", (1, 1)),
        ("\\frac{1}{2}", "The answer is 1/2 or 1/3.", (1, 0)),
        ("42", "<answer>42</answer>", (1, 0)),
    ],
)
def test_latex(gold, completion, expected):
    assert scores(MATH(), gold, completion) == expected


def test_a_bomb_scores_nothing():
    assert scores(MATH(), "387420489", "\\boxed{9^{9^{9^{9}}}}") == (1, 0)


def test_tags_hold_the_answer_alone():
    assert scores(MATH(TAGS), "\\frac{1}{2}", WRAPPED.format("0.5")) == (1, 1)
    assert scores(MATH(TAGS), "42", WRAPPED.format("41 or 42")) == (1, 0)
    assert scores(GSM8K(TAGS), "42", WRAPPED.format("42")) == (1, 1)
    assert scores(GSM8K(TAGS), "42", "#### 42") == (0, 0)
    assert scores(GSM8K(TAGS), "42", WRAPPED.format(42) + WRAPPED.format(42)) == (0, 0)
    assert GSM8K(TAGS).components == ("answered", "accuracy", "format", "tag_count")


def test_raw_stops_where_a_base_model_asks_the_next_question():
    text = " 6 * 7 = 42\n#### 42\n\nQuestion: And now?\nAnswer: #### 41"
    assert scores(GSM8K(PromptFormat(style="raw")), "42", text) == (1, 1)


def test_percent_counts_where_it_is_asked_for():
    question = "He ate 3 of 25 eggs. What percentage of the eggs did he eat?"
    assert scores(GSM8K(), "12", "#### 12%", question=question) == (1, 1)
    assert scores(MATH(), "12", "\\boxed{12\\%}", question=question) == (1, 1)


def test_samples_vote_by_value():
    task, prompt = GSM8K(), problem("42")
    keys = {task.answer_key(prompt, text) for text in ("#### 42", "\\boxed{42.0}", "$42")}
    assert len(keys) == 1
    assert task.answer_key(prompt, "#### 1000") != task.answer_key(prompt, "#### 1")
    assert task.answer_key(prompt, "41 or 42") is None


@pytest.mark.parametrize("prompt_format", [None, TAGS, PromptFormat(style="raw")])
def test_gsm8k_gold_passes_and_that_of_other_rows_does_not(data_folder, prompt_format):
    task = GSM8K(prompt_format, data=data_folder)
    prompts = task.prompts("test", 1319, seed=0)
    assert sum(task.score(p, task.gold(p))["accuracy"] for p in prompts) == 1319
    for prompt, other in pairwise(prompts):
        is_equal = number_of(prompt.columns["answer"]) == number_of(other.columns["answer"])
        assert task.score(prompt, task.gold(other))["accuracy"] == is_equal


@pytest.mark.parametrize("prompt_format", [None, TAGS])
def test_math500_gold_passes(data_folder, prompt_format):
    task = MATH(prompt_format, data=data_folder)
    verdicts = [task.score(p, task.gold(p)) for p in task.prompts("test", 500, seed=0)]
    assert not any(map(inspect.isawaitable, verdicts))
    assert sum(verdict["accuracy"] for verdict in verdicts) == 500


@pytest.mark.long
def test_gold_of_other_rows_of_math500_fails_unless_equal(data_folder):
    task = MATH(data=data_folder)
    prompts = task.prompts("test", 500, seed=0)
    equal = set()
    for prompt, other in pairwise(prompts):
        (found,) = score_completions({"math": task}, prompt, [task.gold(other)])
        if found["accuracy"]:
            equal.add((prompt.columns["answer"], other.columns["answer"]))
    assert equal == {("5", "x=5"), ("7", "7"), ("3", "3")}


def test_math_trains_on_what_math500_leaves(data_folder):
    task = MATH(data=data_folder)
    found = {p.columns["question"] for s in ("train", "validation") for p in everything(task, s)}
    test = {p.columns["question"] for p in everything(task, "test")}
    assert (len(found), len(test), found & test) == (4493, 500, set())  # 7 have several answers
    easy = MATH(data=data_folder, levels=(1, 2))
    assert {p.columns["level"] for p in easy.prompts("train", 50, 0)} == {1, 2}


def everything(task, split):
    return task._questions(split)


def test_prompts_begin_alike_and_the_seed_moves_training_only(data_folder):
    task = GSM8K(data=data_folder)
    assert task.prompts("train", 5, 0) == task.prompts("train", 9, 0)[:5]
    assert task.prompts("train", 5, 0) != task.prompts("train", 5, 1)
    first = task.prompts("test", 2, 0)
    assert first == task.prompts("test", 2, 1)  # the first of the file, for everyone
    assert first[0].columns["answer"] == "18"
    assert "<<" not in task.gold(task.prompts("train", 1, 0)[0])


def test_tags_need_no_instruction(data_folder):
    (chat,) = GSM8K(data=data_folder).prompts("test", 1, 0)
    (tags,) = GSM8K(TAGS, data=data_folder).prompts("test", 1, 0)
    assert "####" in chat.messages[-1]["content"]
    assert "####" not in tags.messages[-1]["content"]


def test_baselines_are_wrong_most_of_the_time(data_folder):
    task = GSM8K(data=data_folder)
    prompts = task.prompts("test", 300, 0)
    for answer in task.baselines().values():
        assert sum(task.score(p, answer(p))["accuracy"] for p in prompts) < 30


@pytest.mark.parametrize(
    ("make", "num", "prompt_format"),
    [
        (GSM8K, 1319, None),
        (GSM8K, 1319, TAGS),
        (GSM8K, 1319, PromptFormat(style="raw")),
        (MATH, 500, None),
        pytest.param(MATH, 500, TAGS, marks=pytest.mark.long),  # math-verify reads the questions
    ],
)
def test_to_copy_the_question_or_all_its_numbers_earns_nothing(
    data_folder, make, num, prompt_format
):
    task = make(prompt_format, data=data_folder)
    right = Counter()
    for prompt in task.prompts("test", num, seed=0):
        numbers = re.findall(r"\d[\d,]*(?<!,)(?:\.\d+)?", prompt.columns["question"])
        copies = {"echo": task.baselines()["echo"](prompt)}
        if len(set(numbers)) > 1:
            for mark in (", ", " ", " or "):
                listed = mark.join(numbers)
                marked = listed if prompt_format == TAGS else task._marked(listed)
                copies[mark] = task.prompt_format.gold(marked, "so")
        found = score_completions({task.name: task}, prompt, list(copies.values()))
        right.update({name: one["accuracy"] for name, one in zip(copies, found, strict=True)})
    assert set(right) == {"echo", ", ", " ", " or "}
    assert not any(right.values()), right


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_users_own_problems(tmp_path):
    rows = [{"q": f"What is {i} + 1?", "a": i + 1} for i in range(40)]
    task = WordProblems(
        write(tmp_path / "a.jsonl", rows), question_column="q", answer_column="a",
        validation_fraction=0.3, test_path=write(tmp_path / "b.jsonl", rows[:5]),
    )  # fmt: skip
    train, validation = everything(task, "train"), everything(task, "validation")
    test = everything(task, "test")
    assert len(train) + len(validation) == 35  # the five of the test file are kept apart
    assert {p.columns["question"] for p in test} == {row["q"] for row in rows[:5]}
    for prompt in train:
        assert task.score(prompt, task.gold(prompt)) == {"answered": 1, "accuracy": 1}
    latex = WordProblems(
        write(tmp_path / "c.jsonl", [{"question": "Half?", "answer": "\\frac12"}]),
        comparison="latex", validation_fraction=0,
    )  # fmt: skip
    (prompt,) = latex.prompts("train", 1, 0)
    assert score_completions({latex.name: latex}, prompt, ["0.5"])[0]["accuracy"] == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "answer": "1"}, {"question": "q"}], "line 2: there is no column"),
        (
            [{"question": "q", "answer": "many"}],
            "line 1: column 'answer' is 'many', wanted one number",
        ),
        ([], "has no rows"),
    ],
)
def test_faults_of_a_users_file_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        WordProblems(write(tmp_path / "a.jsonl", rows)).prompts("train", 1, 0)


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="comparison='exact'"):
        WordProblems("a.jsonl", comparison="exact")
    with pytest.raises(ValueError, match="levels=\\(6,\\)"):
        MATH(levels=(6,))
    with pytest.raises(ValueError, match="validation_fraction=1"):
        GSM8K(validation_fraction=1)
    with pytest.raises(ValueError, match=r"test_fraction=0\.95"):
        WordProblems("a.jsonl", test_fraction=0.95)
