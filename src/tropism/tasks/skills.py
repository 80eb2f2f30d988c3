"""Ten character-level micro-skills: one-line questions with short answers, for a tiny model.

A sample of each (both wordings ask the same thing):
    add       "34+58="               "add 34 and 58"              92
    subtract  "58-34="               "take 34 from 58"            24
    larger    "larger of 7 and 31"   "max 7 31"                   31
    reverse   "reverse tilo"         "tilo backwards"             olit
    sort      "sort dbca"            "dbca in order"              abcd
    count     "count a in banana"    "how many a: banana"         3
    choice    "3+4? A 6 B 7 C 9"     "pick 3+4: A 6 B 7 C 9"      B
    record    "name=bob age=7"       "json: name bob, age 7"      {"name":"bob","age":7}
    bracket   "close ([{"            "end ([{"                   }])
    evaluate  "x=3;x=x+2;x"          "run x=3;x=x+2;x"            5

Questions are drawn without end from (split, seed). Which split a question belongs to is a hash of
its first wording, so that no split holds a rewording of another split's question.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import ClassVar, NamedTuple, get_args

from tropism.tasks.base import Scores, Split, Task
from tropism.types import Prompt

LETTERS = "abcdefghij"
OPERATORS: Mapping[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
CLOSING = {"(": ")", "[": "]", "{": "}"}
INTEGER = re.compile(r"-?[0-9]{1,6}")
WORD = re.compile(r"[a-z]+")
_MEMBER = r'"[a-z]+"\s*:\s*(?:"[a-z0-9]*"|0|[1-9][0-9]{0,5})'
RECORD = re.compile(rf"\{{\s*{_MEMBER}\s*,\s*{_MEMBER}\s*\}}")

MAX_ATTEMPTS_PER_PROMPT = 2_000


class Exercise(NamedTuple):
    """One question in both wordings (terse, wordy), and its answer."""

    wordings: tuple[str, str]
    answer: str


@dataclass(frozen=True)
class Skill:
    """One micro-skill.

    Args:
        domain: maths, text, choice, structured or code.
        make: Draws an exercise.
        form: What every answer of this skill looks like (full match).
        constant: An answer that is right more often than most, for the constant baseline.
    """

    domain: str
    make: Callable[[random.Random], Exercise]
    form: re.Pattern[str]
    constant: str


def _word(rng: random.Random, low: int, high: int, letters: str = LETTERS) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))


def _add(rng: random.Random) -> Exercise:
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    return Exercise((f"{a}+{b}=", f"add {a} and {b}"), str(a + b))


def _subtract(rng: random.Random) -> Exercise:
    b, a = sorted((rng.randint(1, 50), rng.randint(1, 50)))
    return Exercise((f"{a}-{b}=", f"take {b} from {a}"), str(a - b))


def _larger(rng: random.Random) -> Exercise:
    a, b = rng.sample(range(1, 100), 2)
    return Exercise((f"larger of {a} and {b}", f"max {a} {b}"), str(max(a, b)))


def _reverse(rng: random.Random) -> Exercise:
    word = _word(rng, 3, 4)
    return Exercise((f"reverse {word}", f"{word} backwards"), word[::-1])


def _sort(rng: random.Random) -> Exercise:
    word = _word(rng, 3, 4)
    return Exercise((f"sort {word}", f"{word} in order"), "".join(sorted(word)))


def _count(rng: random.Random) -> Exercise:
    letters = "".join(rng.sample(LETTERS, 2))
    word, letter = _word(rng, 3, 6, letters), letters[0]
    wordings = (f"count {letter} in {word}", f"how many {letter}: {word}")
    return Exercise(wordings, str(word.count(letter)))


def _choice(rng: random.Random) -> Exercise:
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    near = [value for value in range(a + b - 4, a + b + 5) if value > 0 and value != a + b]
    options = [*rng.sample(near, 2), a + b]
    rng.shuffle(options)
    listed = " ".join(f"{mark} {value}" for mark, value in zip("ABC", options, strict=True))
    return Exercise((f"{a}+{b}? {listed}", f"pick {a}+{b}: {listed}"), "ABC"[options.index(a + b)])


def _record(rng: random.Random) -> Exercise:
    text_key, number_key = rng.choice(("name", "pet")), rng.choice(("age", "id"))
    text, number = _word(rng, 2, 3), rng.randint(1, 99)
    answer = json.dumps({text_key: text, number_key: number}, separators=(",", ":"))
    terse = f"{text_key}={text} {number_key}={number}"
    return Exercise((terse, f"json: {text_key} {text}, {number_key} {number}"), answer)


def _bracket(rng: random.Random) -> Exercise:
    opened: list[str] = []
    shown = ""
    for _ in range(rng.randint(3, 5)):
        if opened and rng.random() < 0.25:
            shown += CLOSING[opened.pop()]
        else:
            opened.append(rng.choice("([{"))
            shown += opened[-1]
    if not opened:
        opened, shown = ["("], shown + "("  # something must be left to close
    answer = "".join(CLOSING[mark] for mark in reversed(opened))
    return Exercise((f"close {shown}", f"end {shown}"), answer)


def _evaluate(rng: random.Random) -> Exercise:
    value, name = rng.randint(1, 9), rng.choice("xyz")
    lines = [f"{name}={value}"]
    for _ in range(rng.choice((1, 2))):
        sign, operand = rng.choice("+-*"), rng.randint(1, 5)
        value = OPERATORS[sign](value, operand)
        lines.append(f"{name}={name}{sign}{operand}")
    program = ";".join([*lines, name])
    return Exercise((program, f"run {program}"), str(value))


SKILLS: Mapping[str, Skill] = {
    "add": Skill("maths", _add, INTEGER, "100"),
    "subtract": Skill("maths", _subtract, INTEGER, "1"),
    "larger": Skill("maths", _larger, INTEGER, "99"),
    "reverse": Skill("text", _reverse, WORD, "abc"),
    "sort": Skill("text", _sort, WORD, "abc"),
    "count": Skill("text", _count, re.compile(r"[0-9]"), "2"),
    "choice": Skill("choice", _choice, re.compile(r"[ABC]"), "B"),
    "record": Skill("structured", _record, RECORD, '{"name":"bob","age":7}'),
    "bracket": Skill("code", _bracket, re.compile(r"[)\]}]+"), ")))"),
    "evaluate": Skill("code", _evaluate, INTEGER, "1"),
}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(terse_question: str) -> Split:
    """The split that a question, in its first wording, belongs to on every machine."""
    hundredth = int(_digest(terse_question)[:8], 16) % 100
    return "train" if hundredth < 80 else "validation" if hundredth < 90 else "test"


def _pairs(record: str) -> list[tuple[str, str | int]]:
    """Members of a flat record in the order of their keys; a repeated key stays visible."""
    members: list[tuple[str, str | int]] = json.loads(record, object_pairs_hook=list)
    return sorted(members, key=lambda member: member[0])


class Skills(Task):
    """Micro-skills across maths, text, choice, structured output and code.

    Components: ``format`` (the answer, stripped, has the form of the skill's answers) and
    ``accuracy`` (it is the answer; a record may differ in blanks and in the order of its fields).
    ``Prompt.columns`` holds ``skill``, ``domain``, ``wording`` (terse or wordy) and ``answer``.

    Args:
        skills: The skills to draw from, in turn; None takes all. Name a subset to hold others out.
        name: The task's name in records, so that two selections can stand side by side.

    Raises:
        ValueError: A skill is unknown or named twice, or none is given.
    """

    components: ClassVar[tuple[str, ...]] = ("format", "accuracy")
    primary: ClassVar[str] = "accuracy"

    def __init__(self, skills: tuple[str, ...] | None = None, name: str = "skills") -> None:
        self.skills = tuple(SKILLS) if skills is None else tuple(skills)
        self.name = name
        unknown = [skill for skill in self.skills if skill not in SKILLS]
        if unknown or not self.skills or len(set(self.skills)) < len(self.skills):
            raise ValueError(
                f"skills={self.skills!r}: name at least one skill, each once, out of "
                f"{list(SKILLS)}."
            )

    def prompts(self, split: Split, num: int, seed: int) -> Sequence[Prompt]:
        """``num`` distinct prompts, every ``len(skills)`` in a row holding each skill once.

        Raises:
            ValueError: The split is unknown, or its questions run out.
        """
        if split not in get_args(Split):
            raise ValueError(f"split={split!r}: choose from {get_args(Split)}.")
        rng = random.Random(f"{seed}/{split}")
        prompts: list[Prompt] = []
        seen: set[str] = set()
        while len(prompts) < num:
            for skill in rng.sample(self.skills, len(self.skills))[: num - len(prompts)]:
                prompt = self._draw(skill, split, rng, seen)
                seen.add(prompt.id)
                prompts.append(prompt)
        return prompts

    def _draw(self, skill: str, split: Split, rng: random.Random, seen: set[str]) -> Prompt:
        for _ in range(MAX_ATTEMPTS_PER_PROMPT):
            wordings, answer = SKILLS[skill].make(rng)
            wording = rng.randrange(2)
            question = wordings[wording]
            prompt_id = f"{self.name}/{skill}/{_digest(question)[:16]}"
            if split_of(wordings[0]) == split and prompt_id not in seen:
                columns = {
                    "skill": skill,
                    "domain": SKILLS[skill].domain,
                    "wording": ("terse", "wordy")[wording],
                    "answer": answer,
                }
                message = {"role": "user", "content": question}
                return Prompt(prompt_id, self.name, messages=(message,), columns=columns)
        raise ValueError(
            f"task {self.name!r}: no new {split!r} question of skill {skill!r} in "
            f"{MAX_ATTEMPTS_PER_PROMPT} draws after {len(seen)} prompts; ask for fewer prompts."
        )

    def score(self, prompt: Prompt, completion: str) -> Scores:
        """Judge one completion: blanks around it are ignored, words around it are not."""
        text, answer = completion.strip(), prompt.columns["answer"]
        form = SKILLS[prompt.columns["skill"]].form
        has_form = form.fullmatch(text) is not None
        is_right = text == answer
        if has_form and form is RECORD:
            is_right = _pairs(text) == _pairs(answer)
        return {"format": float(has_form), "accuracy": float(has_form and is_right)}

    def gold(self, prompt: Prompt) -> str | None:
        """The answer."""
        return str(prompt.columns["answer"])

    def baselines(self) -> Mapping[str, Callable[[Prompt], str]]:
        """A constant answer for each skill, and the question echoed."""
        return {
            "constant": lambda prompt: SKILLS[prompt.columns["skill"]].constant,
            "echo": lambda prompt: (prompt.messages or ({"content": ""},))[0]["content"],
        }
