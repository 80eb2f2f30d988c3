"""Reasoning Gym: what is refused, strict extraction and comparison, disjoint splits."""

import inspect
import itertools
import json
import random
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from tropism.tasks.final_answer import extract_answer, same_answer
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.reasoning import INSTRUCTION, Reasoning
from tropism.tasks.reasoning_datasets import HASH_DEPENDENT, REFUSED, SEVERAL_ANSWERS
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

pytestmark = pytest.mark.usefixtures("fixed_hashes")

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


@pytest.fixture
def fixed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Answer: 7", "7"),
        ("3 + 4 is 7.\nAnswer: 7\n", "7"),
        ("  answer:7", "7"),
        ("Answer: 41 or 42", "41 or 42"),  # one answer, and a wrong one
        ("7", None),
        ("The answer is 7", None),
        ("The Answer: 7", None),  # not at the start of a line
        ("Answer: 6\nAnswer: 7", None),  # no second guess
        ("Answer: 7\nThat was easy.", None),
        ("Answer:", None),
        ("Answer: \n", None),
        ("Answer: " + "9" * 2_001, None),
        ("", None),
    ],
)
def test_one_final_answer_is_extracted(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


def test_a_grid_may_span_lines() -> None:
    assert extract_answer("Answer:\n1 2\n3 4\n", can_span_lines=True) == "1 2\n3 4"
    assert extract_answer("Answer:\n1 2\nAnswer:\n3 4", can_span_lines=True) is None


@pytest.mark.parametrize(
    ("answer", "gold", "is_same"),
    [
        ("7", "7", True),
        ("7.", "7", True),
        ("**7**", "7", True),
        ("`7`", "7", True),
        ("7.0", "7", True),
        ("1,234", "1234", True),
        ("+7", "7", True),
        ("Yes", "yes", True),
        ("a  b", "a b", True),
        ("1 2\n3  4 ", "1 2\n3 4", True),
        ("12,34", "1234", False),
        ("7 apples", "7", False),
        ("x = 7", "7", False),
        ("7 8", "7", False),
        ("77", "7", False),
        ("-7", "7", False),
        ("7%", "7", False),
        ("7/1", "7", False),
        ("1e1", "10", False),
        ("no", "yes", False),
    ],
)
def test_answers_are_compared_strictly(answer: str, gold: str, is_same: bool) -> None:
    assert same_answer(answer, gold) is is_same


def test_scores_by_hand() -> None:
    task = Reasoning("chain_sum", ONE_DIGIT)
    prompt = task.prompts("train", 1, seed=0)[0]
    gold = prompt.columns["answer"]
    assert task.score(prompt, f"Answer: {gold}") == {"format": 1.0, "accuracy": 1.0}
    assert task.score(prompt, "Answer: 99999") == {"format": 1.0, "accuracy": 0.0}
    assert task.score(prompt, gold) == {"format": 0.0, "accuracy": 0.0}
    everything = " ".join(str(number) for number in range(-20, 20))
    assert task.score(prompt, f"Answer: {everything}")["accuracy"] == 0.0


def test_another_right_answer_counts_where_there_are_several() -> None:
    task = Reasoning("knights_knaves", {"n_people": 2})
    prompt = task.prompts("train", 1, seed=0)[0]
    first, second = prompt.columns["answer"].removesuffix(".").split(", and ")
    assert task.score(prompt, f"Answer: {second}, and {first}.")["accuracy"] == 1.0
    # The package itself pays 0.65 for one of two people.
    half = f"{first}, and {second.split(' is a ')[0]} is a "
    wrong = half + ("knave" if second.endswith("knight") else "knight")
    assert task.score(prompt, f"Answer: {wrong}")["accuracy"] == 0.0


def test_a_data_set_without_gold_answers_is_judged_by_its_scorer() -> None:
    task = Reasoning("graph_color", {"min_num_vertices": 3, "max_num_vertices": 3})
    prompt = task.prompts("train", 1, seed=0)[0]
    puzzle = prompt.columns["entry"]["metadata"]["puzzle"]
    distinct = dict(zip(map(str, puzzle["vertices"]), puzzle["color_options"], strict=False))
    assert task.score(prompt, f"Answer: {json.dumps(distinct)}")["accuracy"] == 1.0
    missing_one = dict(list(distinct.items())[:2])
    assert task.score(prompt, f"Answer: {json.dumps(missing_one)}")["accuracy"] == 0.0


def test_what_a_lenient_scorer_of_the_package_lets_pass_fails_here() -> None:
    task = Reasoning("game_of_life_halting")
    entry = {"answer": "True"}
    assert DATASETS["game_of_life_halting"][0].score_answer(None, "banana", entry) == 1.0
    prompt = Prompt(id="p", task=task.name, text="halts?", columns=entry)
    assert task.score(prompt, "Answer: banana")["accuracy"] == 0.0


@pytest.mark.parametrize("dataset", sorted(REFUSED))
def test_unsafe_data_sets_are_refused_with_the_reason(dataset: str) -> None:
    with pytest.raises(ValueError, match=rf"dataset='{dataset}' is refused: \w+"):
        Reasoning(dataset)


def test_the_list_of_unsafe_data_sets_misses_none_that_evaluates_text() -> None:
    for name, (dataset, _) in DATASETS.items():
        source = inspect.getsource(dataset.score_answer)
        if "eval(" in source.replace('eval(entry["answer"])', "") or "parse_expr" in source:
            assert name in REFUSED, name


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"'chain_sums' is not in reasoning-gym. Did you mean ch"):
        Reasoning("chain_sums")
    with pytest.raises(ValueError, match=r"config has \['terms'\].*'max_terms'"):
        Reasoning("chain_sum", {"terms": 2})
    with pytest.raises(ValueError, match=r"config has \['seed'\]"):
        Reasoning("chain_sum", {"seed": 2})
    with pytest.raises(ValueError, match="refused by the data set 'chain_sum'"):
        Reasoning("chain_sum", {"min_terms": 0})
    with pytest.raises(ValueError, match="split='dev'"):
        Reasoning().prompts("dev", 1, seed=0)


def test_splits_share_no_question_whatever_the_seeds() -> None:
    task = Reasoning("chain_sum", TWO_DIGITS)
    questions = {
        split: {
            prompt.messages[0]["content"]
            for seed in range(3)
            for prompt in task.prompts(split, 150, seed)
        }
        for split in ("train", "validation", "test")
    }
    assert not questions["train"] & questions["validation"]
    assert not questions["train"] & questions["test"]
    assert not questions["validation"] & questions["test"]


def test_prompts_are_distinct_stable_and_extend() -> None:
    task = Reasoning("chain_sum", TWO_DIGITS)
    prompts = list(task.prompts("train", 60, seed=4))
    assert len({prompt.id for prompt in prompts}) == 60
    assert prompts == list(Reasoning("chain_sum", TWO_DIGITS).prompts("train", 90, seed=4))[:60]
    assert prompts != list(task.prompts("train", 60, seed=5))


@pytest.mark.parametrize("dataset", ["acre", "gsm_symbolic", "list_functions"])
def test_a_data_set_of_fixed_size_goes_on_with_another_seed(dataset: str) -> None:
    """These, and word_ladder, make no more than ``size`` (500) questions at once."""
    task = Reasoning(dataset)
    found = task.prompts("train", 600, seed=0)
    assert len({prompt.id for prompt in found}) == 600
    assert found[:450] == task.prompts("train", 450, seed=0)


def test_other_data_sets_go_on_as_one_would() -> None:
    whole = Reasoning("chain_sum")._make(seed=7)
    entries = itertools.islice(Reasoning("chain_sum")._entries(seed=7), 1200)
    assert all(
        entry["question"] == whole[i]["question"] and entry["answer"] == whole[i]["answer"]
        for i, entry in enumerate(entries)
    )


@pytest.mark.parametrize("dataset", ["knight_swap", "list_functions"])
def test_pythons_global_generator_neither_matters_nor_moves(dataset: str) -> None:
    random.seed(1)
    state = random.getstate()
    found = Reasoning(dataset).prompts("train", 15, seed=0)
    assert random.getstate() == state
    random.seed(2)
    assert Reasoning(dataset).prompts("train", 15, seed=0) == found


@pytest.mark.parametrize("value", [None, "random"])
def test_data_sets_that_hashes_of_strings_move_need_them_fixed(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    if value is not None:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    Reasoning("chain_sum")
    for dataset in HASH_DEPENDENT:
        with pytest.raises(ValueError, match=rf"'{dataset}'.*PYTHONHASHSEED=0.*it is 'random'"):
            Reasoning(dataset)


def test_a_data_set_that_runs_out_says_with_which_config(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Reasoning("word_ladder")
    source = task._make(seed=0)

    def used_up(*arguments: object) -> None:
        raise RuntimeError("Failed to find valid pair for length 3")

    monkeypatch.setattr(source, "_generate_word_pair", used_up)
    monkeypatch.setattr(task, "_make", lambda seed: source)
    with pytest.raises(ValueError, match=r"'word_ladder' with config=.*no question 0.*Widen its"):
        task.prompts("train", 1, seed=0)


def test_a_small_question_space_says_so() -> None:
    task = Reasoning("chain_sum", ONE_DIGIT)  # some 200 questions in all
    with pytest.raises(NotEnoughPromptsError, match="widen its config") as caught:
        task.prompts("validation", 200, seed=0)
    assert 5 < caught.value.num_available < 60
    assert len(task.prompts("validation", caught.value.num_available, seed=0)) > 5


NASTY = [
    "",
    "-",
    "=",
    ",",
    "×",
    "A=1",
    "[[]]",
    "[1]",
    "{}",
    '{"0": 1}',
    '["fill Z", 3]',
    '[["a"], 3]',
    "null",
    "1" * 1_999,
    "Move disk 9 from Peg 9 to Peg 9",
    "w,A1,B2",
    "no",
    "up down left",
    "[" * 1_999,
    "\u0664\ud800",
    "__import__('os').mkdir('pwned')",
]


@pytest.mark.parametrize("dataset", sorted(SEVERAL_ANSWERS))
def test_own_scorers_give_full_marks_to_gold_alone(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = Reasoning(dataset)
    for prompt in task.prompts("train", 2, seed=0):
        gold = prompt.columns["answer"]
        if gold is not None:
            assert task.score(prompt, f"Answer: {gold}")["accuracy"] == 1.0
        for text in NASTY:
            if text == str(gold).lower():  # "no" where a puzzle has no solution
                continue
            assert task.score(prompt, f"Answer: {text}")["accuracy"] == 0.0, text
    assert not list(tmp_path.iterdir())


def test_with_tags_the_answer_block_alone_is_judged() -> None:
    plain = Reasoning("chain_sum", ONE_DIGIT)
    task = Reasoning("chain_sum", ONE_DIGIT, prompt_format=PromptFormat(style="tags"))
    prompt, other = (one.prompts("train", 1, seed=0)[0] for one in (task, plain))
    assert prompt.id == other.id  # the same question, put in another way
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert INSTRUCTION not in prompt.messages[1]["content"]
    assert task.components == ("accuracy", "format", "tag_count")
    assert plain.components == ("format", "accuracy")

    gold = prompt.columns["answer"]
    right = {"accuracy": 1.0, "format": 1.0, "tag_count": 1.0}
    assert task.score(prompt, task.gold(prompt)) == right
    block = "<think>\nx\n</think>\n<answer>\n{}\n</answer>".format
    assert task.score(prompt, block("99999")) == {**right, "accuracy": 0.0}
    assert task.score(prompt, block(f"{gold} or 99999"))["accuracy"] == 0.0
    assert task.score(prompt, block(f"{gold}\n99999"))["accuracy"] == 0.0
    assert task.score(prompt, block(f"Answer: {gold}"))["accuracy"] == 0.0
    # The outcome counts without the whole form.
    scores = task.score(prompt, f"It is <answer>{gold}</answer>")
    assert scores == {"accuracy": 1.0, "format": 0.0, "tag_count": 0.5}
    nothing = {"accuracy": 0.0, "format": 0.0, "tag_count": 0.0}
    assert task.score(prompt, f"Answer: {gold}") == nothing
    assert task.score(prompt, "") == nothing


def test_raw_prompts_are_answered_by_the_first_line() -> None:
    task = Reasoning("chain_sum", ONE_DIGIT, prompt_format=PromptFormat(style="raw"))
    prompt = task.prompts("train", 1, seed=0)[0]
    assert prompt.text.startswith("Question: ")
    assert prompt.text.endswith("\nAnswer:")
    gold = prompt.columns["answer"]
    assert task.gold(prompt) == f" {gold}"
    assert task.score(prompt, f" {gold}\nQuestion: and then?") == {"accuracy": 1.0}
    assert task.score(prompt, f" 99999\n{gold}") == {"accuracy": 0.0}
    assert task.score(prompt, f" {gold} or 99999") == {"accuracy": 0.0}
    assert task.score(prompt, "\n") == {"accuracy": 0.0}


def test_grids_keep_their_lines_in_every_prompt_format() -> None:
    gold = "1 2\n3 4"
    prompt = Prompt(id="p", task="chain_sum", text="?", columns={"answer": gold})
    for style in ("chat", "tags", "raw"):
        task = Reasoning("chain_sum", prompt_format=PromptFormat(style=style))
        assert task.score(prompt, task.gold(prompt))["accuracy"] == 1.0, style
        assert task.score(prompt, task.gold(prompt).replace("4", "5"))["accuracy"] == 0.0, style
    assert task.score(prompt, f" {gold}\n\nQuestion: another")["accuracy"] == 1.0


def test_a_system_message_leaves_the_rest_as_it_is() -> None:
    task = Reasoning("chain_sum", ONE_DIGIT, prompt_format=PromptFormat(system="Be brief."))
    prompt = task.prompts("train", 1, seed=0)[0]
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert prompt.messages[1]["content"].endswith(INSTRUCTION)
    assert task.score(prompt, task.gold(prompt)) == {"format": 1.0, "accuracy": 1.0}
