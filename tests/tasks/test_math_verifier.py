"""math-verify in other processes: right and wrong, deadlines, threads, crashes."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tropism.tasks.math_verifier import MathVerifier
from tropism.tasks.math_writing import written
from tropism.tasks.sources import read_rows

BOMB = "9^{9^{9^{9}}}"


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(deadline=2.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac{1}{2}", "\\frac{2}{4}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("1,-2", "-2,1", True),
        ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}", True),
        ("42", "x=42", True),
        ("90^\\circ", "90", True),
        ("(3,4]", "(3, 4]", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
        ("(3,4]", "(3,4)", False),
        ("(1,2)", "(2,1)", False),
        ("x+1", "x-1", False),
        ("\\text{Evelyn}", "Evan", False),
        ("2\\sqrt{5}", "2\\sqrt{5", False),
        ("7", "", False),
        ("7", "\\frac{1}{0}", False),
        ("7", "\\foo{", False),
        ("7", "{" * 400, False),
        ("7", "((((((((((((7", False),
    ],
)
def test_same(verifier, gold, answer, same):
    assert verifier.same(gold, answer) is same


def test_a_bomb_costs_its_deadline_once_and_starves_nobody(verifier):
    """Sixteen threads ask about one bomb, as a group of completions would, others beside them."""
    verifier.same("7", "6+1")  # has started
    lost, began = verifier.num_lost, time.monotonic()
    with ThreadPoolExecutor(17) as threads:
        bombs = [threads.submit(verifier.same, "3", BOMB) for _ in range(16)]
        others = [threads.submit(verifier.same, "8", f"{i}+1") for i in range(20)]
        assert [i for i, other in enumerate(others) if other.result()] == [7]
        assert not any(bomb.result() for bomb in bombs)
    assert verifier.num_lost <= lost + 1
    assert time.monotonic() - began < 60  # 2 s of the processor, on however busy a machine
    assert verifier.same("9", "3^2")


def test_a_worker_that_dies_is_replaced(verifier):
    assert verifier.same("10", "2 \\cdot 5")
    for worker in list(verifier._workers):
        worker.process.kill()
        worker.process.wait()
    answers = [verifier.same("11", f"{i}+9") for i in (2, 3, 4)]
    assert answers[-1] is False
    assert verifier.same("12", "2 \\cdot 6")


def test_from_the_threads_of_a_loop(verifier):
    async def ask():
        pairs = [("13", "12+1"), ("13", "12+2"), ("14", "28/2")]
        return await asyncio.gather(*(verifier.same_later(*pair) for pair in pairs))

    assert asyncio.run(ask()) == [True, False, True]
    assert asyncio.run(ask()) == [True, False, True]  # and of the next loop


def test_closing_ends_the_processes():
    verifier = MathVerifier(num_workers=1)
    assert not verifier._workers  # none before the first question
    assert verifier.same("4", "2+2")
    (worker,) = verifier._workers
    verifier.close()
    assert worker.process.poll() is not None


def test_a_worker_that_cannot_start_is_an_error_and_no_verdict(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    verifier = MathVerifier(num_workers=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="did not start"):
            verifier.same("4", "2+2")
    verifier.close()


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.long)])
def test_gold_answers_are_the_same_as_themselves_by_math_verify(verifier, data_folder, step):
    rows, _ = read_rows("math500", "test", data=data_folder)
    golds = [written(row["answer"]) for row in rows[::step]]
    assert [gold for gold in golds if not verifier.same(gold, f"{gold} ")] == []
