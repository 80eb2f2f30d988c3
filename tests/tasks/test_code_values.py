"""The calculator and the taking apart of asserts, against Python itself."""

from __future__ import annotations

import ast

import pytest

from tropism.tasks.code_tests import CodeTest, convert
from tropism.tasks.code_values import FAULTS, UnsupportedError, evaluate


def value_of(expression: str, **names: object) -> object:
    return evaluate(ast.parse(expression, mode="eval").body, names)


@pytest.mark.parametrize(
    "expression",
    [
        "[1, (2.5, 'a'), {3}, {'k': None}]",
        "(3 + 5 + 7, 3 * 5 * 7, 2 ** 10, 7 // 2, 7 % 4, 1 / 3, -2, ~5)",
        "abs(-1.5 - 0.5) < 1e-6",
        "1 < 2 <= 2 != 3",
        "not (True and 0) or [] == ()",
        "set((4, 5)) == {5, 4} and sorted([3, 1]) == [1, 3]",
        "math.isclose(0.1 + 0.2, 0.3, rel_tol=1e-9)",
        "math.fabs(-math.pi)",
        "list(range(-99, 100, 50))",
        "'abcde' + 'cade'",
        "None is None and True is not False and 2 in [2] and 3 not in (2,)",
        "round(2.567, 1) + [10, 20][1] + {'a': 3}['a']",
        "complex(1, 2) * 1j",
    ],
)
def test_values_are_those_of_python(expression: str) -> None:
    import math

    assert value_of(expression) == eval(expression, {"math": math})


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "open('/etc/passwd')",
        "().__class__",
        "math.__loader__",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "f'{1}'",
        "9 ** 9 ** 9",
        "range(10 ** 9)",
        "[0] * 10 ** 9",
        "'%1000000000d' % 1",
        "{**{1: 2}}",
        "max(*[1, 2])",
        "unknown",
    ],
)
def test_all_else_is_refused(expression: str) -> None:
    with pytest.raises(UnsupportedError):
        value_of(expression)


@pytest.mark.parametrize("value", ["x", None, [], {}, 10**4000, float("nan"), 1j, b"", (1,)])
def test_values_of_the_wrong_kind_hold_nothing(value: object) -> None:
    for expression in ("abs(_0 - 1.5) < 1e-6", "_0 ** 2 == 4", "_0[0] == 2", "set(_0) == {2}"):
        assert CodeTest(("()",), expression).holds([value]) is False


@pytest.mark.parametrize(
    ("source", "calls", "right", "wrong"),
    [
        ("assert f(1, [2]) == (3, 4)", ["(1, [2])"], [(3, 4)], [[3, 4]]),
        ("assert (f(1)) == 2, 'message'", ["(1,)"], [2], [3]),
        ("assert set(f(1)) == set((4, 5))", ["(1,)"], [[5, 4]], [[5]]),
        ("assert abs(f(0.5) - 1.5) < 1e-6", ["(0.5,)"], [1.5000001], [1.6]),
        ("assert math.isclose(f(), 3.0, abs_tol=0.1)", ["()"], [3.05], [3.2]),
        ("assert f(1) == True", ["(1,)"], [True], [False]),
        ("assert f(1) is True", ["(1,)"], [True], [1]),
        ("assert f(1) is None", ["(1,)"], [None], [0]),
        ("assert f('a')", ["('a',)"], [[0]], [[]]),
        ("assert not f('a')", ["('a',)"], [0], [1]),
        ("assert f(1) != 2", ["(1,)"], [3], [2]),
        ("assert f(3 * 19) == [3, 19]", ["(57,)"], [[3, 19]], [[19, 3]]),
        ("assert tuple(f([1])) == tuple(f([2]))", ["([1],)", "([2],)"], [[7], [7]], [[7], [8]]),
    ],
)
def test_forms_of_asserts(source: str, calls: list[str], right: list, wrong: list) -> None:
    (test,) = convert(ast.parse(source).body, {"f"})
    assert list(test.calls) == calls
    assert test.holds(right)
    assert not test.holds(wrong)


def test_loops_and_names_are_unrolled() -> None:
    source = """
limit = [2, 3]
for x in range(2, 5):
    assert candidate(x, x + 1) == str(x)
assert candidate(limit) == limit
assert True, "this prints"
"""
    tests = convert(ast.parse(source).body, {"candidate"})
    assert [test.calls for test in tests] == [("(2, 3)",), ("(3, 4)",), ("(4, 5)",), ("([2, 3],)",)]
    assert [test.holds(["3"]) for test in tests] == [False, True, False, False]
    assert tests[3].holds([[2, 3]])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import random\nassert f(random.random()) == 1", "import random"),
        ("assert f(Node(1)) == 1", "Node"),
        ("assert f(x=1) == 1", "keywords"),
        ("assert f(1) == g(1)", "calls `g`"),
        ("assert g(1) == 1", "calls `g`"),
        ("for i in range(1000):\n    assert f(i) == i", "1000 rounds"),
        ("assert True", "no assert calls"),
        ("assert 1 == 1", "calls nothing"),
        ("assert f(range(3)) == 1", "has no literal"),
        ("with f(1):\n    pass", "with f"),
    ],
)
def test_what_cannot_be_taken_apart_is_named(source: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        convert(ast.parse(source).body, {"f"})


def test_faults_are_python_s_own() -> None:
    """All that evaluation of hostile values can raise is caught where verdicts are made."""
    for expression in ("1 / 0", "[][1]", "{}['a']", "int('x')", "-'a'", "2.0 ** 10000"):
        with pytest.raises(FAULTS):
            value_of(expression)
