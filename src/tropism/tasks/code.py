"""Code: MBPP and HumanEval, judged outside of the process that runs the answer.

A sample of MBPP and an answer that passes:
    Write a python function to find the cube of a number. It must pass this test:
    assert cube(2) == 8
    Answer with Python code in one fenced block.

    ```python
    def cube(n):
        return n ** 3
    ```

Differs from the benchmarks' own harnesses, which run answer and asserts in one process, where the
answer can print a verdict of its own or return an object that equals everything: here the function
is called in a sandbox, returns literals, and the trusted side compares. Tests that cannot be taken
apart like that (``unconverted``) are left out, or run in the sandbox with ``in_child_asserts``:
those verdicts can be forged, which is why training never uses them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tropism.sandbox import Limits, Setting
from tropism.tasks.base import Split
from tropism.tasks.code_answers import before_function, fenced, functions_of
from tropism.tasks.code_task import CodeTask, Problem
from tropism.tasks.code_tests import CodeTest, convert
from tropism.tasks.code_values import UnsupportedError
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.row_files import shown

INSTRUCTION = "Answer with Python code in one fenced block."


class MBPP(CodeTask):
    """Mostly Basic Python Problems, in the official split: 374 to train on, 90, and 500 to test.

    Args:
        num_shown_tests: So many of a problem's three asserts stand in the question, at least one:
            the function's name is nowhere else. Published scores show all three; a model that
            trains on those can earn the reward by looking the answers up.
        data: Folder with the benchmarks' folders; null for ``TROPISM_DATA`` or the hub.
        prompt_format: How questions are put; chat where null.
        sandbox: ``auto``, or ``rlimits`` to accept resource limits alone where there is no better.
        limits: What one answer may use.
        in_child_asserts: For evaluation only: also ask what cannot be taken apart, and believe the
            verdict of the process that runs the answer. Such verdicts are forgeable.
        name: Identifies the task in records and metrics.

    Raises:
        ValueError: A setting that cannot work.
    """

    benchmark = "mbpp"
    parts: ClassVar[Mapping[Split, str]] = {
        "train": "train",
        "validation": "validation",
        "test": "test",
    }

    def __init__(
        self,
        num_shown_tests: int = 1,
        *,
        data: str | None = None,
        prompt_format: PromptFormat | None = None,
        sandbox: Setting = "auto",
        limits: Limits | None = None,
        in_child_asserts: bool = False,
        name: str = "mbpp",
    ) -> None:
        if num_shown_tests not in (1, 2, 3):
            raise ValueError(f"num_shown_tests={num_shown_tests}: choose 1, 2 or 3.")
        self.num_shown_tests = num_shown_tests
        super().__init__(name, data, prompt_format, sandbox, limits, in_child_asserts)

    def _problem(self, row: Mapping[str, Any]) -> Problem:
        code = row["code"].replace("\r\n", "\n")
        asserts = tuple(line.replace("\r\n", "\n").strip() for line in row["test_list"])
        setup = row["test_setup_code"].replace("\r\n", "\n")
        function = _function_under_test(code, asserts)
        tests, fault = _converted("\n".join((setup, *asserts)), {function})
        shown = "\n".join(asserts[: self.num_shown_tests])
        which = "this test" if self.num_shown_tests == 1 else "these tests"
        return Problem(
            id=str(row["task_id"]),
            question=f"{row['text'].strip()} It must pass {which}:\n{shown}\n{INSTRUCTION}",
            stub="",
            function=function,
            preamble="",
            gold=code,
            tests=tests,
            statements=tuple(part for part in (setup, *asserts) if part),
            fault=fault,
            num_shown=self.num_shown_tests,
        )


class HumanEval(CodeTask):
    """HumanEval: 164 functions to complete, for evaluation only.

    With the format ``raw`` and a template of ``{question}`` alone, a base model continues the
    function's head and docstring; else the whole function is asked for, in a fenced block.

    Args:
        data: Folder with the benchmarks' folders; null for ``TROPISM_DATA`` or the hub.
        prompt_format: How questions are put; chat where null.
        sandbox: ``auto``, or ``rlimits`` to accept resource limits alone where there is no better.
        limits: What one answer may use.
        in_child_asserts: Also ask what cannot be taken apart, and believe the verdict of the
            process that runs the answer. Such verdicts are forgeable.
        name: Identifies the task in records and metrics.
    """

    benchmark = "humaneval"
    parts: ClassVar[Mapping[Split, str]] = {"test": "test"}

    def __init__(
        self,
        *,
        data: str | None = None,
        prompt_format: PromptFormat | None = None,
        sandbox: Setting = "auto",
        limits: Limits | None = None,
        in_child_asserts: bool = False,
        name: str = "humaneval",
    ) -> None:
        super().__init__(name, data, prompt_format, sandbox, limits, in_child_asserts)

    def _problem(self, row: Mapping[str, Any]) -> Problem:
        function, stub = row["entry_point"], row["prompt"]
        body = _body_of_check(row["test"])
        tests, fault = _converted(body, {"candidate", function})
        return Problem(
            id=row["task_id"].removeprefix("HumanEval/"),
            question=f"Complete this function:\n{fenced(stub.strip())}\n{INSTRUCTION}",
            stub=stub,
            function=function,
            preamble=before_function(stub, function),
            gold=stub + row["canonical_solution"],
            tests=tests,
            statements=(f"{row['test']}\ncheck({function})",),
            fault=fault,
        )


def _converted(source: str, functions: set[str]) -> tuple[tuple[CodeTest, ...], str]:
    try:
        return tuple(convert(ast.parse(source).body, functions)), ""
    except UnsupportedError as error:
        return (), str(error)


def _function_under_test(code: str, asserts: Sequence[str]) -> str:
    """The function of the canonical solution that the first assert calls."""
    defined = functions_of(code)
    called = [
        node.func.id
        for node in ast.walk(ast.parse(asserts[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    found = [name for name in called if name in defined]
    if not found:
        raise ValueError(f"column 'test_list': {asserts[0]!r} calls none of {defined}.")
    return found[0]


def _body_of_check(test: str) -> str:
    """The statements of ``def check(candidate)``."""
    for node in ast.parse(test).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return "\n".join(ast.unparse(statement) for statement in node.body)
    raise ValueError(f"column 'test' defines no function `check`: {shown(test)}.")
