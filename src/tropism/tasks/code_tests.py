"""Asserts of code benchmarks, taken apart: the calls to make, and what must hold of their results.

    assert abs(mean([1.0, 2.0]) - 1.5) < 1e-6
    ->  call ([1.0, 2.0],)    must hold: abs(_0 - 1.5) < 1e-06

The call goes into the sandbox; the rest is judged by the trusted side. Loops over literals are
unrolled. What else a test does (random inputs, reference implementations, objects of classes that
the answer defines) cannot be taken apart, and is named.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tropism.tasks.code_values import FAULTS, UnsupportedError, evaluate

MAX_ROUNDS = 200
"""Of an unrolled loop."""


@dataclass(frozen=True)
class CodeTest:
    """One assert.

    Args:
        calls: Literals of the tuples of arguments that the function is called with.
        expression: What must be true, with the results named ``_0``, ``_1``, ...
    """

    calls: tuple[str, ...]
    expression: str

    def holds(self, results: Sequence[Any]) -> bool:
        """Whether the results of ``calls`` meet the expression; wrong kinds do not."""
        try:
            return bool(
                evaluate(_parsed(self.expression), {f"_{i}": v for i, v in enumerate(results)})
            )
        except FAULTS:
            return False


def convert(statements: Sequence[ast.stmt], functions: Collection[str]) -> list[CodeTest]:
    """The tests that asserts, assignments of literals and loops over literals amount to.

    Args:
        statements: The body of a test.
        functions: Names under which the function under test is called.

    Raises:
        UnsupportedError: Something cannot be taken apart; the message names it.
    """
    tests = list(_convert(statements, functions, {}))
    if not tests:
        raise UnsupportedError("no assert calls the function")
    return tests


def _convert(
    statements: Sequence[ast.stmt], functions: Collection[str], names: dict[str, Any]
) -> Iterator[CodeTest]:
    for statement in statements:
        match statement:
            case ast.Assert():
                test = _test(statement.test, functions, names)
                if test.calls:  # else it is `assert True`
                    yield test
            case ast.Assign(targets=[ast.Name(id=name)]):
                names[name] = _literal(statement.value, names)
            case ast.For(target=ast.Name(id=name), orelse=[]):
                values = list(evaluate(statement.iter, names))
                if len(values) > MAX_ROUNDS:
                    raise UnsupportedError(f"a loop of {len(values)} rounds")
                for value in values:
                    yield from _convert(statement.body, functions, {**names, name: value})
            case ast.Pass() | ast.Expr(value=ast.Constant() | ast.Name()):
                pass
            case _:
                raise UnsupportedError(f"`{ast.unparse(statement).splitlines()[0][:80]}`")


class _Calls(ast.NodeTransformer):
    """Replaces calls of the function by names of their results, and known names by literals."""

    def __init__(self, functions: Collection[str], names: Mapping[str, Any]) -> None:
        self.functions, self.names = functions, names
        self.calls: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (isinstance(node.func, ast.Name) and node.func.id in self.functions):
            node.args = [self.visit(part) for part in node.args]
            for keyword in node.keywords:
                keyword.value = self.visit(keyword.value)
            return node
        if node.keywords:
            raise UnsupportedError("calls with keywords")
        self.calls.append(repr(tuple(_literal(part, self.names) for part in node.args)))
        return ast.Name(f"_{len(self.calls) - 1}", ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            return node
        return ast.parse(repr(self.names[node.id]), mode="eval").body


def _test(expression: ast.expr, functions: Collection[str], names: Mapping[str, Any]) -> CodeTest:
    calls = _Calls(functions, names)
    rest = calls.visit(copy.deepcopy(expression))
    test = CodeTest(tuple(calls.calls), ast.unparse(rest))
    try:  # with results of no use: only whether the calculator knows all parts matters
        evaluate(_parsed(test.expression), {f"_{i}": 0 for i in range(len(test.calls))})
    except UnsupportedError:
        raise
    except FAULTS:
        pass
    if not test.calls and not isinstance(rest, ast.Constant):
        raise UnsupportedError(f"`{test.expression[:80]}` calls nothing")
    return test


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a part without calls of the function, which must have a literal."""
    try:
        value = evaluate(node, names)
    except UnsupportedError:
        raise
    except FAULTS as error:
        raise UnsupportedError(f"`{ast.unparse(node)[:80]}`: {error}") from error
    try:
        is_literal = ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        is_literal = False
    if not is_literal:
        raise UnsupportedError(f"`{ast.unparse(node)[:80]}` has no literal")
    return value


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body
