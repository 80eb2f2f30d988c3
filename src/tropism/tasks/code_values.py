"""A calculator for the asserts of code benchmarks: Python expressions, without running Python.

It evaluates what test authors write around a call (``abs(f(x) - 1.5) < 1e-6``, ``set(f(x)) ==
{1}``), in the trainer's process, over values that model-written code returned. So it knows
literals, arithmetic on numbers, comparisons and a few pure functions, and bounds what can grow.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MAX_ITEMS = 10_000
"""Of a range or a repeated sequence."""
MAX_BITS = 4096
"""Of a power."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(abs, all, any, bool, complex, dict, float, frozenset, int, len, list, max, min),
        *(round, set, sorted, str, sum, tuple),
    )
}
MATHS: Mapping[str, Any] = {
    name: getattr(math, name) for name in ("ceil", "e", "fabs", "floor", "isclose", "pi", "sqrt")
}
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}


def _is_same(left: Any, right: Any) -> bool:
    """``is``, for what there is one of; equal values else, whose identity means nothing."""
    if left is None or right is None or isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return type(left) is type(right) and bool(left == right)


COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: _is_same,
    ast.IsNot: lambda left, right: not _is_same(left, right),
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,  # codespell:ignore
}
FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an expression may raise over a value of the wrong kind."""


class UnsupportedError(ValueError):
    """The expression is more than this calculator knows."""


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression.

    Args:
        node: The expression.
        names: Values of its names; functions and ``math`` are known besides.

    Raises:
        UnsupportedError: It has what is not known here, or makes something too large.
        ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError: As
            Python would raise.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.List():
            return [evaluate(part, names) for part in node.elts]
        case ast.Tuple():
            return tuple(evaluate(part, names) for part in node.elts)
        case ast.Set():
            return {evaluate(part, names) for part in node.elts}
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {evaluate(_given(key), names): evaluate(value, names) for key, value in pairs}
        case ast.UnaryOp():
            return UNARY[type(node.op)](evaluate(node.operand, names))
        case ast.BinOp():
            return _binary(node.op, evaluate(node.left, names), evaluate(node.right, names))
        case ast.BoolOp():
            is_and, value = isinstance(node.op, ast.And), None
            for part in node.values:
                value = evaluate(part, names)
                if bool(value) != is_and:
                    break
            return value
        case ast.Compare():
            left = evaluate(node.left, names)
            for kind, right_node in zip(node.ops, node.comparators, strict=True):
                right = evaluate(right_node, names)
                if not COMPARISONS[type(kind)](left, right):
                    return False
                left = right
            return True
        case ast.Call():
            function = _function(node.func, names)
            keywords = {_given(word.arg): evaluate(word.value, names) for word in node.keywords}
            return function(*(evaluate(part, names) for part in node.args), **keywords)
        case ast.Attribute(value=ast.Name(id="math")) if node.attr in MATHS:
            return MATHS[node.attr]
        case ast.Subscript():
            return evaluate(node.value, names)[evaluate(node.slice, names)]
        case _:
            raise UnsupportedError(f"`{ast.unparse(node)[:80]}` is not supported")


def _function(node: ast.expr, names: Mapping[str, Any]) -> Callable[..., Any]:
    match node:
        case ast.Name(id="range") if "range" not in names:
            return _range
        case ast.Name() if node.id in FUNCTIONS and node.id not in names:
            return FUNCTIONS[node.id]
        case ast.Attribute(value=ast.Name(id="math")) if callable(MATHS.get(node.attr)):
            function: Callable[..., Any] = MATHS[node.attr]
            return function
    raise UnsupportedError(f"calls `{ast.unparse(node)[:80]}`")


def _binary(kind: ast.operator, left: Any, right: Any) -> Any:
    are_numbers = isinstance(left, (int, float, complex)) and isinstance(
        right, (int, float, complex)
    )
    if isinstance(kind, ast.Add):
        return left + right
    if isinstance(kind, ast.Mult):
        if not are_numbers:
            raise UnsupportedError("repeats a sequence")
        return left * right
    if isinstance(kind, ast.Pow):
        if not are_numbers:
            raise TypeError("a power of what is no number")
        are_integers = isinstance(left, int) and isinstance(right, int)
        if are_integers and left.bit_length() * abs(right) > MAX_BITS:
            raise UnsupportedError("a power too large")
        return left**right
    if type(kind) in ARITHMETIC and not isinstance(left, (str, bytes)):  # no formatting
        return ARITHMETIC[type(kind)](left, right)
    raise UnsupportedError(f"operator {type(kind).__name__}")


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > MAX_ITEMS:
        raise UnsupportedError("a range too long")
    return found


def _given(part: T | None) -> T:
    if part is None:
        raise UnsupportedError("unpacks a mapping")
    return part
