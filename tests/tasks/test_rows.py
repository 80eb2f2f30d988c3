"""A user's own rows: loading with named faults, splits that do not move, scorers by path."""

import json
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from tropism.rewards import contains, exact_match
from tropism.tasks.base import Task
from tropism.tasks.rows import Rows
from tropism.tasks.splits import NotEnoughPromptsError


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def capitals(num: int) -> list[dict[str, str]]:
    return [{"prompt": f"Capital of land {i}?", "answer": f"City {i}"} for i in range(num)]


def questions(task: Rows, split: str, num: int, seed: int = 0) -> set[str]:
    return {prompt.columns["prompt"] for prompt in task.prompts(split, num, seed)}


def sizes(task: Rows) -> list[int]:
    found = []
    for split in ("train", "validation", "test"):
        with pytest.raises(NotEnoughPromptsError) as caught:
            task.prompts(split, 10_000, seed=0)
        found.append(caught.value.num_available)
    return found


def test_rows_become_prompts_and_reach_the_scorer(tmp_path: Path) -> None:
    calls: list[Any] = []

    def scorer(prompt: str, completion: str, *, answer: str, level: int) -> float:
        calls.append((prompt, completion, answer, level))
        return float(completion == answer)

    rows = [{"prompt": "Capital of France?", "answer": "Paris", "level": 2}]
    task = Rows(write(tmp_path / "a.jsonl", rows), scorer, validation_fraction=0)
    (prompt,) = task.prompts("train", 1, seed=0)
    assert prompt.messages == ({"role": "user", "content": "Capital of France?"},)
    assert task.score(prompt, "Paris") == {"reward": 1.0}
    assert task.score(prompt, "Rome") == {"reward": 0.0}
    assert calls[0] == ("Capital of France?", "Paris", "Paris", 2)


def test_raw_text_and_messages(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 + 1 =", "answer": "2"}])
    (prompt,) = Rows(path, exact_match, validation_fraction=0, chat=False).prompts("train", 1, 0)
    assert (prompt.text, prompt.messages) == ("1 + 1 =", None)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    path = write(tmp_path / "b.jsonl", [{"messages": messages, "answer": "2"}])
    task = Rows(path, exact_match, validation_fraction=0)
    (prompt,) = task.prompts("train", 1, seed=0)
    assert list(prompt.messages) == messages
    assert task.score(prompt, " 2\n") == {"reward": 1.0}


def test_several_components_and_abstaining(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "p"}])
    answers: list[Any] = [{"form": 1.0, "right": None}, None, 0.5]
    task = Rows(path, lambda prompt, completion: answers.pop(0), ("form", "right"))
    (prompt,) = Rows(path, exact_nothing, validation_fraction=0).prompts("train", 1, seed=0)
    assert task.primary == "right"
    assert task.score(prompt, "") == {"form": 1.0, "right": None}
    assert task.score(prompt, "") == {"form": None, "right": None}
    with pytest.raises(ValueError, match=r"returned 0.5; with components=\('form', 'right'\)"):
        task.score(prompt, "")


def exact_nothing(prompt: str, completion: str) -> None:
    return None


def test_adding_rows_moves_none_between_splits(tmp_path: Path) -> None:
    few = Rows(write(tmp_path / "few.jsonl", capitals(200)), exact_match, test_fraction=0.2)
    many = Rows(write(tmp_path / "many.jsonl", capitals(400)[::-1]), exact_match, test_fraction=0.2)
    few_sizes, many_sizes = sizes(few), sizes(many)
    assert sum(few_sizes) == 200
    assert sum(many_sizes) == 400
    assert 8 <= few_sizes[1] <= 32  # 20 +- 3 standard deviations
    assert 23 <= few_sizes[2] <= 57
    for split, small, large in zip(
        ("train", "validation", "test"), few_sizes, many_sizes, strict=True
    ):
        assert questions(few, split, small) < questions(many, split, large)


def test_the_order_is_keyed_by_the_seed_and_extends(tmp_path: Path) -> None:
    task = Rows(write(tmp_path / "a.jsonl", capitals(50)), exact_match)
    first = list(task.prompts("train", 30, seed=0))
    assert first[:10] == list(task.prompts("train", 10, seed=0))
    assert first != list(task.prompts("train", 30, seed=1))


def test_files_of_their_own_hold_the_held_out_rows(tmp_path: Path) -> None:
    rows = capitals(30)
    task = Rows(
        write(tmp_path / "train.jsonl", rows[:20]),
        exact_match,
        validation_path=write(tmp_path / "validation.jsonl", rows[20:25]),
        test_path=write(tmp_path / "test.jsonl", rows[25:]),
    )
    assert sizes(task) == [20, 5, 5]
    assert questions(task, "test", 5) == {row["prompt"] for row in rows[25:]}


def test_without_test_rows_the_error_says_what_to_give(tmp_path: Path) -> None:
    task = Rows(write(tmp_path / "a.jsonl", capitals(20)), exact_match)
    with pytest.raises(NotEnoughPromptsError, match="give test_path or raise test_fraction"):
        task.prompts("test", 1, seed=0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "a.jsonl: the file has no rows"),
        ("\n\n", "a.jsonl: the file has no rows"),
        ('{"prompt": "p", "answer": 1}\n\n{"prompt": ', "a.jsonl, line 3: Expecting value"),
        ("[1]", "line 1: a row must be a JSON object"),
        ('{"answer": 1}', "line 1: a row must have either `prompt` or `messages`"),
        ('{"prompt": "p", "messages": [], "answer": 1}', "line 1: .* and not both"),
        ('{"prompt": " ", "answer": 1}', "line 1: `prompt` must be a string that is not blank"),
        ('{"prompt": 3, "answer": 1}', "line 1: `prompt` must be a string"),
        ('{"messages": [], "answer": 1}', "line 1: `messages` must be a list"),
        ('{"messages": [{"role": "user"}], "answer": 1}', "line 1: `messages` must be a list"),
        ('{"prompt": "p", "answer": 1, "completion": "c"}', r"\['completion'\] bear the names"),
        ('{"prompt": "p"}', r"scorer cannot take the columns \[\]: missing .* 'answer'"),
        (
            '{"prompt": "p", "answer": 1}\n{"prompt": "p", "answer": 2}',
            "line 2: the prompt of line 1 again, with other columns",
        ),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Rows(str(path), exact_match).prompts("train", 1, seed=0)


@pytest.mark.fault(6)
def test_a_column_that_collides_with_the_scorers_own_arguments(tmp_path: Path) -> None:
    def scorer(question: str, reply: str, **columns: Any) -> float:
        return 1.0

    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "reply": "r"}])
    with pytest.raises(ValueError, match=r"line 1: the columns \['reply'\] bear the names"):
        Rows(path, scorer).prompts("train", 1, seed=0)


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.jsonl: there is no such file"):
        Rows(str(tmp_path / "no.jsonl"), exact_match).prompts("train", 1, seed=0)
    with pytest.raises(ValueError, match="name each component once"):
        Rows("x", exact_match, ("a", "a"))
    with pytest.raises(ValueError, match="primary='b' is not among"):
        Rows("x", exact_match, ("a",), primary="b")
    with pytest.raises(ValueError, match="leave something to train on"):
        Rows("x", exact_match, validation_fraction=0.6, test_fraction=0.4)
    path = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "c"}]}])
    with pytest.raises(ValueError, match="need chat=true"):
        Rows(path, exact_nothing, chat=False).prompts("train", 1, seed=0)


def test_equal_rows_count_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", capitals(3) + capitals(3))
    assert sizes(Rows(path, exact_match, validation_fraction=0))[0] == 3


def test_built_in_scorers() -> None:
    assert exact_match("p", " Paris\n", answer="Paris") == 1.0
    assert exact_match("p", "7", answer=7) == 1.0
    assert exact_match("p", "Paris.", answer="Paris") == 0.0
    assert contains("p", "It is PARIS.", answer="Paris", level=3) == 1.0
    assert contains("p", "Parisian", answer="Paris") == 0.0
    assert contains("p", "costs $4.50!", answer="$4.50") == 1.0


def test_a_config_names_the_scorer_by_dotted_path(tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--task", type=Task)
    path = write(tmp_path / "a.jsonl", capitals(5))
    config = {
        "class_path": "tropism.tasks.rows.Rows",
        "init_args": {
            "path": path,
            "scorer": "tropism.rewards.exact_match",
            "components": ["right"],
            "primary": "right",
        },
    }
    task = parser.instantiate(parser.parse_object({"task": config})).task
    assert task.scorer is exact_match
    assert task.components == ("right",)
    prompt = task.prompts("train", 1, seed=0)[0]
    assert task.score(prompt, prompt.columns["answer"]) == {"right": 1.0}
    parsed = parser.parse_object({"task": config})
    again = parser.parse_string(parser.dump(parsed))
    assert again.task.init_args.scorer is exact_match
