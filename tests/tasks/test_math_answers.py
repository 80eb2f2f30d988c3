"""One final answer, and what is more than one."""

import time
from fractions import Fraction

import pytest

from tropism.tasks.math_answers import (
    asks_percent,
    calculations,
    claims_more,
    final_answer,
)
from tropism.tasks.math_writing import number_of, written, written_alike


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24, so 72.\n#### 72", "72"),
        ("#### Step 1\nAdd them.\n#### 72", "72"),  # a heading is no answer
        ("So \\boxed{3} at first. Then we see that it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\text{a {b} c}}", "\\text{a {b} c}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("The answer is 42.", "42"),
        ("**Final Answer:** 42", "42"),
        ("The answer is 3.50. That is all.", "3.50"),
        ("The answer is $\\boxed{42}$.", "42"),
        ("The answer is found by adding. So \\boxed{9}", "9"),
        ("We may check our answer: $17 \\cdot 44 = 748$. \\boxed{44} it is", "44"),
        ("42", "42"),
        ("  \\frac{1}{2}  ", "\\frac{1}{2}"),
        ("\\boxed{7}, again \\boxed{7.0}", "7.0"),
        ("The answer is 6, since 2*3 = 6.", "6"),
        ("The answer is 6 because 2*3 = 6.", "6"),
        ("2*3 = 6.\n\n**Answer:**\n\n6", "6"),
        ("2*3 = 6, so the answer is\n\\[\n6\n\\]", "6"),
        ("2*3 = 6.\n####\n6", "6"),
        ("Answer:\n\n16 eggs are laid. He eats 3.\n#### 13", "13"),  # below it stands the working
        # several
        ("\\boxed{41} or \\boxed{42}", None),
        ("$\\boxed{41}$, $\\boxed{42}$", None),
        ("\\boxed{41}\n\n\\boxed{42}", None),
        ("\\boxed{41} $\\text{ or }$ \\boxed{42}", None),
        ("#### 41\n#### 42", None),
        ("The answer is 41. The answer is 42.", None),
        ("The answer is 41 or 42. The answer is 42.", None),
        ("The answer is 41. So \\boxed{42}", None),
        ("\\boxed{41} and #### 42", None),
        # none
        ("", None),
        ("   \n ", None),
        ("It is 42,\nI think.", None),
        ("\\boxed{42", None),
        ("So the answer is", None),
        ("####", None),
        ("Answer:\n", None),
        ("Answer: 5\n####\n6", None),
        ("\\boxed{}", None),
        ("\\boxed{" + "1+" * 600 + "1}", None),
    ],
)  # fmt: skip
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 20_000, "\\boxed{" * 9_000 + "}" * 9_000, "answer is " * 9_000, "####" * 20_000,
     "{" * 50_000, "\\boxed{1} " * 9_000, "-" * 50_000, "1," * 30_000, "answer:" + " " * 50_000,
     "answer:\n" + "a " * 30_000, "\n" * 50_000 + "\\]", "#### " + "9" * 50_000],
)  # fmt: skip
def test_no_text_takes_long(text):
    began = time.process_time()
    final_answer(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("42.00", "42"),
        ("$42", "42"),
        ("\\$42", "42"),
        ("$42$", "42"),
        ("**42**", "42"),
        ("-$3.50", "-3.5"),
        ("$-3$", "-3"),
        ("−7", "-7"),
        (".5", "0.5"),
        ("1,000", "1000"),
        ("10,\\!080", "10080"),
        ("1{,}000{,}000.5", "1000000.5"),
        ("18 eggs", "18"),
        ("18\\text{ cm}^2", "18"),
        ("60 miles per hour", "60"),
        ("60 miles/hour", "60"),
        ("30^\\circ", "30"),
        ("30°C", "30"),
        ("\\$1,234.00", "1234"),
        ("\\text{3 hours}", "3"),
        ("3 (hours)", "3"),
        ("3\\,\\text{m}^2", "3"),
        ("3 m²", "3"),
        ("3 \\$", "3"),
        ("3€", "3"),
        ("USD 3", "3"),
        ("10\\,080", "10080"),
        ("<72>", "72"),
        ("1/2", "1/2"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("3 1/2", "7/2"),
        ("3\\frac{1}{2} hours", "7/2"),
        ("3\\tfrac12", "7/2"),
        ("3½", "7/2"),
        ("x = 5", "5"),
        ("x_1=-5.", "-5"),
        ("Total cost: $5", "5"),
    ],
)
def test_plain_numbers(text, value):
    assert number_of(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    ["", "41 or 42", "41, 42", "1 2 3 42", "12%", "12 percent", "12\\%", "$41$ $42$", "41$42",
     "5 hundred", "42k", "3 and a half", "3.5 1/2", "1/0", "1/2/3", "5/6 or 7", "1e5", "5^2", "4!",
     "12:30", "1,00", "1,0000",
     "42 or more", "less than 42", "x", "--5", "-$-5", "42 is not the answer", "~6", "<6", "5-6",
     "5 = 6", "x = 5 = 6", "x == 6", "x != 6", "not x = 6", "if x = 6", "a or b = 6", "2 * 3 = 6",
     "9" * 5000],
)  # fmt: skip
def test_what_is_not_one_plain_number(text):
    assert number_of(text) is None


def test_percent_where_the_question_asks_for_it():
    assert number_of("12%", can_be_percent=True) == number_of("12 percent", can_be_percent=True)
    assert asks_percent("He ate 3 of 12. What percentage of the eggs did he eat?")
    assert not asks_percent("With 20 percent off, how much does he pay?")
    assert not claims_more("12\\%", "12", can_be_percent=True)


@pytest.mark.parametrize(
    ("answer", "gold", "more"),
    [
        ("41 or 42", "42", True),
        ("41 \\text{ and } 42", "42", True),
        ("1 2 3 42", "42", True),
        ("41, 42", "42", True),
        ("\\{41, 42\\}", "42", True),
        ("\\pm 42", "42", True),
        ("12\\%", "12", True),
        ("42", "42", False),
        ("1,234", "1234", False),
        ("f(1, 2)", "3", False),
        ("(1, 2)", "(1, 2)", False),
        ("-2, 1", "1,-2", False),
        ("1+\\sqrt{19}, 1-\\sqrt{19}", "1 \\pm \\sqrt{19}", False),
        ("12\\%", "12\\%", False),
        ("3 1/2", "\\frac{7}{2}", False),
    ],
)
def test_more_than_one_claim(answer, gold, more):
    assert claims_more(answer, gold) is more


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("\\dfrac{1}{2}", "\\frac{1}{2}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("$\\text{Evelyn}$", "Evelyn", True),
        ("1,000.0", "1000", True),
        ("1 2", "12", False),
        ("0.5", "\\frac{1}{2}", True),
        ("\\sqrt{4}", "2", False),  # the same, but that is math-verify's to say
        ("x=5", "5", True),
        ("y=5", "x=5", False),
        ("\\text{evelyn}", "\\text{Evelyn}", True),
        ("evelyn", "\\text{Evelyn}", True),
        ("ABC", "abc", False),  # products
        ("\\text{C}", "\\text{c}", False),
        ("x + 1", "x+1", True),
    ],
)
def test_alike_but_for_their_look(one, other, alike):
    assert written_alike(one, other) is alike


def test_rows_of_a_matrix_stay_apart():
    assert written("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}") == (
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"
    )


@pytest.mark.parametrize(
    ("answer", "gold", "sides"),
    [
        ("2 \\cdot 4 = 6", "6", ["2 \\cdot 4"]),
        ("x = 5 = 6", "6", ["5"]),
        ("f(2) = 6", "6", []),
        ("\\theta = 6", "6", []),
        ("6", "6", []),
        ("2 = x", "x = 2", []),
        ("2 \\le 3", "6", []),
    ],
)
def test_what_an_answer_computes(answer, gold, sides):
    assert calculations(answer, gold) == sides
