"""MBPP and HumanEval: what the real rows become, and what scores, fails and cheats."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tropism.sandbox import SandboxError, shared
from tropism.scoring import score_completions
from tropism.shaping import Repetition
from tropism.tasks.code import MBPP, HumanEval
from tropism.tasks.code_answers import extract_code, fenced, first_body
from tropism.tasks.code_task import CodeTask
from tropism.tasks.extra import Carrier
from tropism.tasks.optional import sandbox_modes
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.skills import Skills
from tropism.tasks.splits import NotEnoughPromptsError
from tropism.types import Prompt

FAULTY = {"123", "367", "927"}
"""Problems of MBPP whose canonical code does not pass their own tests."""
CUBE = {
    "text": "Write a function to find the cube of a number.",
    "code": "def cube(n):\r\n  return n ** 3",
    "test_setup_code": "",
    "test_list": [
        "assert cube(2) == 8",
        "assert cube(-1) == -1",
        "assert cube(1234) == 1879080904",
    ],
    "challenge_test_list": [],
}
SHIFT = {
    "text": "Write a function to shift.",
    "code": "def shift(p):\n  return p.x + 1",
    "test_setup_code": "",
    "test_list": ["assert shift(P(1)) == 2", "assert shift(P(2)) == 3", "assert shift(P(3)) == 4"],
    "challenge_test_list": [],
}
DECODE = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\ndef twice(x):\n    return 2 * x\n\n\n"
    'def four(x: int) -> List[int]:\n    """ Four times x, in a list. """\n',
    "entry_point": "four",
    "canonical_solution": "    return [twice(twice(x))]\n",
    "test": "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == [4]\n"
    "    assert candidate(2) == [8]\n",
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Three rows in the layout of the real data: 11 and 601 of MBPP convert, 12 does not."""
    (tmp_path / "mbpp").mkdir()
    rows = [{**CUBE, "task_id": 11}, {**SHIFT, "task_id": 12}, {**CUBE, "task_id": 601}]
    rows += [{**CUBE, "task_id": 511}, {**SHIFT, "task_id": 602}]
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "humaneval").mkdir()
    with gzip.open(tmp_path / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(DECODE) + "\n")
    notice = "source: example.org at 0123456789abcdef0123456789abcdef01234567\nlicence: MIT\n"
    for name in ("mbpp", "humaneval"):
        (tmp_path / name / "NOTICE.txt").write_text(notice)
    return str(tmp_path)


def scores(task: CodeTask, prompt: Prompt, completions: Sequence[str]) -> list[Any]:
    return [dict(one) for one in score_completions({task.name: task}, prompt, completions)]


def passes(task: CodeTask, pairs: Sequence[tuple[Prompt, str]]) -> list[float | None]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(task.score(*pair) for pair in pairs))  # type: ignore[misc]

    return [one["pass"] for one in asyncio.run(all_of_them())]


# Looks in all that it can name for what a hidden test expects, which it spells backwards, so that
# it does not find itself.
SEARCH = """
import gc, sys
def cube(n):
    frame, text = sys._getframe(), ""
    while frame:
        text += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    text += "".join(repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)))
    return int("4090809781"[::-1]) if "4090809781" in text[::-1] else 0
"""
CASES = {
    "gold": (fenced("def cube(n):\n    return n ** 3"), (1, 1, 1)),
    "another way": ("```python\ncube = lambda n: n * n * n\n```", (1, 1, 1)),
    "bare code": ("def cube(n): return n ** 3", (1, 1, 1)),
    "prose around the block": ("Here:\n```\ndef cube(n): return n**3\n```\nDone.", (1, 1, 1)),
    "wrong": (fenced("def cube(n): return n ** 2"), (1, 0, 0)),
    "half right": (fenced("def cube(n): return n if abs(n) == 1 else n * 4"), (1, 0.5, 0)),
    "empty": ("", (0, 0, 0)),
    "blank": (" \n", (0, 0, 0)),
    "prose": ("The cube of n is n to the power of three.", (0, 0, 0)),
    "truncated": ("```python\ndef cube(n):\n    return n ** 3", (0, 0, 0)),
    "truncated within": (fenced("def cube(n):\n    return n **"), (0, 0, 0)),
    "several guesses": (fenced("def cube(n): return 0") + "\n" + fenced(CUBE["code"]), (0, 0, 0)),
    "another name": (fenced("def cubed(n): return n ** 3"), (0, 0, 0)),
    "not a function": (fenced("cube = 8"), (0, 0, 0)),
    "raises": (fenced("def cube(n): raise ValueError"), (1, 0, 0)),
    "raises at import": (fenced("1 / 0\ndef cube(n): return n ** 3"), (0, 0, 0)),
    "much too long": ("def cube(n): return n ** 3\n" + "#" * 30_000, (0, 0, 0)),
    "lone surrogate": ("def cube(n): return '\ud800'", (0, 0, 0)),
    "null byte": ("def cube(n): return n ** 3\x00", (0, 0, 0)),
    "deep nesting": ("def cube(n): return " + "(" * 5000, (0, 0, 0)),
    "hack: shown answer": (fenced("def cube(n): return 8"), (1, 0, 0)),
    "hack: equals all": (
        fenced("class A(float):\n    __eq__ = lambda s, o: True\ndef cube(n): return A(7)"),
        (1, 0, 0),
    ),
    "hack: exits": (fenced("import os\ndef cube(n): os._exit(0)"), (1, 0, 0)),
    "hack: exits at import": (fenced("import os\nos._exit(0)\ndef cube(n): return 1"), (0, 0, 0)),
    "hack: prints": (fenced("def cube(n): print('PASSED')"), (1, 0, 0)),
    "hack: asserts off": (fenced("def cube(n): return True\n__debug__ and 1"), (1, 0, 0)),
    "hack: returns a test": (fenced("def cube(n): return 'cube(2) == 8'"), (1, 0, 0)),
    "hack: NaN": (fenced("def cube(n): return float('nan')"), (1, 0, 0)),
    "hack: huge": (fenced("def cube(n): return 10 ** 10 ** 6"), (1, 0, 0)),
    "hack: searches memory": (fenced(SEARCH), (1, 0, 0)),
    "hack: infinite": (
        fenced("def cube(n):\n    x = []\n    x.append(x)\n    return x"),
        (1, 0, 0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: str, data: str) -> None:
    completion, (runs, tests, is_pass) = CASES[case]
    task = MBPP(data=data)
    (prompt,) = task.prompts("train", 1, seed=0)
    assert scores(task, prompt, [completion]) == [{"runs": runs, "tests": tests, "pass": is_pass}]


def test_a_table_of_the_shown_tests_earns_nothing(data: str) -> None:
    task = MBPP(data=data)
    (prompt,) = task.prompts("train", 1, seed=0)
    hack = task.baselines()["shown_tests"](prompt)
    assert scores(task, prompt, [hack]) == [{"runs": 1.0, "tests": 0.0, "pass": 0.0}]
    task = MBPP(3, data=data)  # as published: now the table passes
    (prompt,) = task.prompts("train", 1, seed=0)
    hack = task.baselines()["shown_tests"](prompt)
    assert scores(task, prompt, [hack]) == [{"runs": 1.0, "tests": 1.0, "pass": 1.0}]


def test_what_is_asked(data: str) -> None:
    (prompt,) = MBPP(data=data).prompts("train", 1, seed=0)
    assert prompt.messages is not None
    assert prompt.messages[-1]["content"] == (
        "Write a function to find the cube of a number. It must pass this test:\n"
        "assert cube(2) == 8\nAnswer with Python code in one fenced block."
    )
    (prompt,) = MBPP(2, data=data).prompts("train", 1, seed=0)
    assert prompt.messages is not None
    assert (
        "these tests:\nassert cube(2) == 8\nassert cube(-1) == -1\n"
        in prompt.messages[-1]["content"]
    )
    with pytest.raises(ValueError, match="num_shown_tests=0"):
        MBPP(0)


def test_humaneval_gives_what_stands_above_the_function(data: str) -> None:
    task = HumanEval(data=data)
    (prompt,) = task.prompts("test", 1, seed=0)
    right = fenced("def four(x):\n    a: List[int] = [twice(2 * x)]\n    return a")
    assert (
        scores(task, prompt, [right, task.gold(prompt)])
        == [{"runs": 1.0, "tests": 1.0, "pass": 1.0}] * 2
    )
    with pytest.raises(NotEnoughPromptsError, match=r"there are \['test'\]"):
        task.prompts("train", 1, seed=0)


def test_humaneval_is_continued_by_base_models(data: str) -> None:
    task = HumanEval(data=data, prompt_format=PromptFormat("raw", template="{question}"))
    (prompt,) = task.prompts("test", 1, seed=0)
    assert prompt.text == DECODE["prompt"]
    right = "    return [4 * x]\n\n\ndef test():\n    assert (\n"  # cut off within another function
    assert [one["pass"] for one in scores(task, prompt, [right, "    return 4 * x", "4"])] == [
        1,
        0,
        0,
    ]


def test_a_base_model_s_next_question_is_no_part_of_its_answer(data: str) -> None:
    task = MBPP(data=data, prompt_format=PromptFormat("raw"))
    (prompt,) = task.prompts("train", 1, seed=0)
    more = f"{task.gold(prompt)}\n\nQuestion: And now?\nAnswer:\n{fenced('def f(): pass')}"
    assert [one["pass"] for one in scores(task, prompt, [task.gold(prompt), more])] == [1, 1]


def test_test_prompts_come_in_the_order_of_the_file(data_folder: str) -> None:
    task = MBPP(data=data_folder)
    assert [p.id for p in task.prompts("test", 3, seed=7)] == ["mbpp-11", "mbpp-12", "mbpp-13"]
    first, other = ([p.id for p in task.prompts("train", 9, seed=seed)] for seed in (0, 1))
    assert first != other
    assert first[:4] == [p.id for p in task.prompts("train", 4, seed=0)]


def test_tags(data: str) -> None:
    task = MBPP(data=data, prompt_format=PromptFormat("tags"))
    assert task.components == ("runs", "tests", "pass", "format", "tag_count")
    (prompt,) = task.prompts("train", 1, seed=0)
    gold, bare = task.gold(prompt), fenced(CUBE["code"])
    assert scores(task, prompt, [gold]) == [dict.fromkeys(task.components, 1.0)]
    assert scores(task, prompt, [bare]) == [dict.fromkeys(task.components, 0.0)]


def test_forgeable_verdicts_are_opted_into_labelled_and_never_trained_on(data: str) -> None:
    task = MBPP(data=data)
    assert task.unconverted() == {"12": "calls `P`", "602": "calls `P`"}
    assert not task.is_forgeable
    assert [p.id for p in task.problems("test")] == ["11"]
    task = MBPP(data=data, in_child_asserts=True)
    assert task.is_forgeable
    assert [p.id for p in task.problems("train")] == ["601"]
    labels = {p.id: p.columns["forgeable"] for p in task.prompts("test", 2, seed=0)}
    assert labels == {"mbpp-11": False, "mbpp-12": True}
    (prompt,) = [p for p in task.prompts("test", 2, seed=0) if p.columns["forgeable"]]
    right = fenced("class P:\n    def __init__(self, x): self.x = x\ndef shift(p): return p.x + 1")
    wrong = fenced("class P:\n    def __init__(self, x): self.x = x\ndef shift(p): return p.x")
    forged = fenced(
        "class A:\n    __eq__ = lambda s, o: True\nP = lambda x: x\nshift = lambda p: A()"
    )
    assert [one["pass"] for one in scores(task, prompt, [right, wrong, forged])] == [1, 0, 1]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx\n```", "x"),
        ("a\n  ```py\nx\n  ```\nb", "x"),
        ("x = '```'", "x = '```'"),
        ("```\n\n```", None),
        ("```\nx", None),
        ("```\nx\n```\n```\ny\n```", None),
        (None, None),
    ],
)
def test_one_block_or_the_whole_text(answer: str | None, code: str | None) -> None:
    assert extract_code(answer) == code


def test_a_continuation_ends_with_the_function() -> None:
    assert first_body("    a\n\n    b\nprint(1)\n    c") == "    a\n\n    b"
    assert first_body("    a") == "    a"


def test_real_rows_convert_in_the_official_split(data_folder: str) -> None:
    task = MBPP(data=data_folder)
    # Objects of classes that the answer defines; a size in bytes; a comparison with `int`.
    assert set(task.unconverted()) == {"367", "533", "596", "601", "927"}
    sizes = {split: len(task.problems(split)) for split in ("train", "validation", "test")}  # type: ignore[arg-type]
    assert sizes == {"train": 372, "validation": 88, "test": 499}
    ids = [int(p.id) for s in ("train", "validation", "test") for p in task.problems(s)]  # type: ignore[arg-type]
    assert min(ids) == 11, "1 to 10 are for few-shot prompts"
    task = HumanEval(data=data_folder)
    # Random inputs, compared with a reference or a property; a comprehension.
    assert set(task.unconverted()) == {"32", "38", "50", "53", "151"}
    assert len(task.problems("test")) == 159


def golds_and_others(task: CodeTask, split: Any, step: int) -> None:
    prompts = list(task.prompts(split, len(task.problems(split)), seed=0))[::step]
    found = passes(task, [(prompt, task.gold(prompt)) for prompt in prompts])
    failed = {
        p.columns and p.id.split("-")[1] for p, one in zip(prompts, found, strict=True) if one != 1
    }
    assert failed <= FAULTY
    others = [*prompts[1:], prompts[0]]
    found = passes(task, [(a, task.gold(b)) for a, b in zip(prompts, others, strict=True)])
    assert set(found) == {0.0}


@pytest.mark.parametrize(("task", "split"), [(MBPP, "train"), (MBPP, "test"), (HumanEval, "test")])
def test_gold_passes_and_another_row_s_does_not(
    task: type[CodeTask], split: str, data_folder: str
) -> None:
    golds_and_others(task(data=data_folder), split, step=10)  # type: ignore[call-arg]


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "split"),
    [(MBPP, "train"), (MBPP, "validation"), (MBPP, "test"), (HumanEval, "test")],
)
def test_all_gold_answers_pass(task: type[CodeTask], split: str, data_folder: str) -> None:
    golds_and_others(task(data=data_folder), split, step=1)  # type: ignore[call-arg]


@pytest.mark.long
def test_all_gold_answers_pass_their_own_asserts_too(data_folder: str) -> None:
    """What could not be taken apart, in the mode whose verdicts are forgeable."""
    for task in (
        MBPP(data=data_folder, in_child_asserts=True),
        HumanEval(data=data_folder, in_child_asserts=True),
    ):
        prompts = task.prompts("test", len(task.problems("test")), seed=0)
        prompts = [prompt for prompt in prompts if prompt.columns["forgeable"]]
        assert prompts
        assert set(passes(task, [(p, task.gold(p)) for p in prompts])) == {1.0}


def test_what_confines_a_task_is_told_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    carried = Carrier(MBPP(), [Repetition()])
    assert sandbox_modes([Skills(), carried, HumanEval()]) == {
        "mbpp": shared("auto").mode, "humaneval": shared("auto").mode
    }  # fmt: skip

    def none(self: CodeTask) -> str:
        raise SandboxError("no sandbox that holds")

    monkeypatch.setattr(CodeTask, "sandbox_mode", property(none))
    with pytest.raises(SandboxError, match="no sandbox that holds"):
        sandbox_modes([MBPP()])
