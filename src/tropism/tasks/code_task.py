"""What MBPP and HumanEval share: from a row to a prompt, from an answer to a verdict."""

from __future__ import annotations

import ast
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tropism.sandbox import Job, Limits, Mode, Outcome, Setting, Value, shared
from tropism.tasks.base import Scores, Split, Task
from tropism.tasks.code_answers import defines, extract_code, fenced, first_body
from tropism.tasks.code_tests import CodeTest
from tropism.tasks.prompt_format import PromptFormat
from tropism.tasks.sources import DataInfo, read_rows
from tropism.tasks.splits import NotEnoughPromptsError, check_split
from tropism.types import Prompt


@dataclass(frozen=True)
class Problem:
    """One row of a benchmark.

    Args:
        id: As the benchmark numbers it.
        question: What a chat model is asked.
        stub: Code that a base model continues; empty where there is none.
        function: Name of the function under test.
        preamble: Imports and helpers that the answer may rely on.
        gold: The canonical solution, whole.
        tests: The asserts, taken apart; empty where that failed.
        statements: The asserts as they are, to be run with the answer.
        fault: Why they could not be taken apart; empty where they could.
        num_shown: So many of the tests, the first ones, stand in the question.
    """

    id: str
    question: str
    stub: str
    function: str
    preamble: str
    gold: str
    tests: tuple[CodeTest, ...]
    statements: tuple[str, ...]
    fault: str
    num_shown: int = 0


class CodeTask(Task):
    """What MBPP and HumanEval share.

    Components: ``runs`` (the code runs and defines the function), ``tests`` (share passed of the
    tests that the question does not show; of all where it shows all) and ``pass`` (binary: all
    tests), and those of the prompt format.

    Attributes:
        is_forgeable: Some verdicts may be made up by the answer: ``in_child_asserts`` is on. Those
            prompts have ``columns["forgeable"]``.
    """

    benchmark: ClassVar[str]
    parts: ClassVar[Mapping[Split, str]]
    primary: ClassVar[str] = "pass"
    components: tuple[str, ...]  # type: ignore[misc]

    def __init__(
        self,
        name: str,
        data: str | None,
        prompt_format: PromptFormat | None,
        sandbox: Setting,
        limits: Limits | None,
        in_child_asserts: bool,
    ) -> None:
        self.name = name
        self.data = data
        self.prompt_format = prompt_format or PromptFormat()
        self.components = ("runs", "tests", "pass", *self.prompt_format.components)
        self.in_child_asserts = self.is_forgeable = in_child_asserts
        self.sandbox, self.limits = sandbox, limits
        shared(sandbox, limits)  # refuses bad settings now, and starts nothing

    @property
    def sandbox_mode(self) -> Mode:
        """What confines the answers on this machine, for the record of a run.

        Raises:
            SandboxError: No sandbox that holds can be had here.
        """
        return shared(self.sandbox, self.limits).mode

    def data_info(self) -> list[DataInfo]:
        """Where the rows came from, one entry for each part."""
        return [info for _, info in self._parts.values()]

    def unconverted(self) -> dict[str, str]:
        """Ids of the problems whose tests cannot be taken apart, and why."""
        problems = [problem for part, _ in self._parts.values() for problem in part]
        return {problem.id: problem.fault for problem in problems if problem.fault}

    def problems(self, split: Split) -> list[Problem]:
        """The problems of a split that this task asks; for training only those taken apart."""
        check_split(split)
        if split not in self._parts:
            return []
        can_run_asserts = self.in_child_asserts and split != "train"
        return [p for p in self._parts[split][0] if not p.fault or can_run_asserts]

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` problems: of the test split in the order of the file, else as ``seed`` keys.

        More begin with the same ones.

        Raises:
            NotEnoughPromptsError: The split has fewer.
            ValueError: Unknown split; the data are missing or malformed.
        """
        problems = self.problems(split)
        if len(problems) < num:
            remedy = f"take another split (there are {sorted(self.parts)})"
            raise NotEnoughPromptsError(self.name, split, num, len(problems), remedy)
        if split != "test":  # whose first 200, say, are the same for everyone
            problems.sort(key=lambda p: hashlib.sha256(f"{seed}/{p.id}".encode()).digest())
        return [self._prompt(problem) for problem in problems[:num]]

    async def score(self, prompt: Prompt, completion: str) -> Scores:  # type: ignore[override]
        """``runs``, ``tests`` and ``pass``; all 0 for what has no code in it."""
        form = self.prompt_format.scores(completion)
        nothing = {"runs": 0.0, "tests": 0.0, "pass": 0.0, **form}
        program = self._program(prompt, completion)
        if program is None:
            return nothing
        columns = prompt.columns
        tests = [CodeTest(tuple(t["calls"]), t["expression"]) for t in columns["tests"]]
        calls = tuple(call for test in tests for call in test.calls)
        statements = tuple(columns["statements"]) if columns["forgeable"] else ()
        job = Job(program, columns["function"], calls, statements)
        outcome = await shared(self.sandbox, self.limits).run_async(job)
        if not outcome.is_defined:
            return nothing
        passed = _passed(tests, outcome)
        hidden = passed[columns["num_shown"] :] or passed
        share = sum(hidden) / len(hidden)
        return {"runs": 1.0, "tests": share, "pass": float(all(passed)), **form}

    def gold(self, prompt: Prompt) -> str:
        """The canonical solution in a fenced block."""
        code = str(prompt.columns["gold"])
        return self.prompt_format.gold(fenced(code), "The function is written out below.")

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """``shown_tests``: a function that knows nothing but the answers of the tests shown."""
        return {"shown_tests": lambda prompt: fenced(_table(prompt))}

    @abstractmethod
    def _problem(self, row: Mapping[str, Any]) -> Problem:
        """One row, with its tests taken apart."""

    @cached_property
    def _parts(self) -> dict[Split, tuple[list[Problem], DataInfo]]:
        found: dict[Split, tuple[list[Problem], DataInfo]] = {}
        for split, part in self.parts.items():
            rows, info = read_rows(self.benchmark, part, data=self.data)
            found[split] = [self._problem_at(info.place, row) for row in rows], info
        return found

    def _problem_at(self, place: str, row: Mapping[str, Any]) -> Problem:
        try:
            return self._problem(row)
        except (SyntaxError, ValueError) as error:  # of code that the row brings
            raise ValueError(
                f"{place}, task_id {row['task_id']}: {error} Mend the row, or take it out."
            ) from error

    def _prompt(self, problem: Problem) -> Prompt:
        is_continued = self.prompt_format.style == "raw" and bool(problem.stub)
        return self.prompt_format.prompt(
            id=f"{self.name}-{problem.id}",
            task=self.name,
            question=problem.stub if is_continued else problem.question,
            columns={
                "function": problem.function,
                "preamble": problem.preamble,
                "stub": problem.stub if is_continued else "",
                "gold": problem.gold,
                "tests": [
                    {"calls": list(test.calls), "expression": test.expression}
                    for test in problem.tests
                ],
                "statements": list(problem.statements),
                "forgeable": bool(problem.fault),
                "num_shown": problem.num_shown,
            },
        )

    def _program(self, prompt: Prompt, completion: str) -> str | None:
        """What is run; None where the answer holds no code."""
        answer = self.prompt_format.answer(completion)
        if answer is not None and self.prompt_format.style == "raw":
            # A base model goes on with questions of its own.
            opening = self.prompt_format.template.partition("{question}")[0].strip()
            answer = answer.partition(opening)[0] if opening else answer
        code = extract_code(answer)
        if code is None:
            return None
        columns = prompt.columns
        if columns["stub"] and not defines(code, columns["function"]):
            return str(columns["stub"]) + first_body(code)
        return f"{columns['preamble']}\n{code}"


def _passed(tests: Sequence[CodeTest], outcome: Outcome) -> list[bool]:
    if not tests:
        return [isinstance(result, Value) for result in outcome.results]
    results = iter(outcome.results)
    passed = []
    for test in tests:
        own = [next(results) for _ in test.calls]
        values = [result.value for result in own if isinstance(result, Value)]
        passed.append(len(values) == len(own) and test.holds(values))
    return passed


def _table(prompt: Prompt) -> str:
    """Code that looks the shown tests up."""
    columns = prompt.columns
    shown = []
    for test in columns["tests"][: columns["num_shown"]]:
        expression = ast.parse(test["expression"], mode="eval").body
        if isinstance(expression, ast.Compare):
            shown.append(f"{test['calls'][0]!r}: {ast.unparse(expression.comparators[0])}")
    return (
        f"def {columns['function']}(*arguments):\n    return {{{', '.join(shown)}}}"
        ".get(repr(arguments))"
    )
