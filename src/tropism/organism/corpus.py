"""The organism's corpus: questions of the skills, answered by someone unreliable and chatty.

A model calibrated to this corpus *samples* right, wrong and badly formed answers alike, which gives
groups of mixed reward. Wordy questions are answered in a sentence more often: a habit that
reinforcement can change and that wording predicts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from tropism.tasks.skills import SKILLS, split_of

# Shares of right and wrong answers to (terse, wordy) questions; the rest is chat around an answer.
SHARES: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "add": ((0.70, 0.10), (0.45, 0.10)),
    "subtract": ((0.70, 0.10), (0.45, 0.10)),
    "larger": ((0.50, 0.30), (0.30, 0.20)),
    "reverse": ((0.60, 0.15), (0.40, 0.10)),
    "sort": ((0.60, 0.15), (0.40, 0.10)),
    "count": ((0.55, 0.25), (0.35, 0.15)),
    "choice": ((0.70, 0.10), (0.45, 0.10)),
    "record": ((0.45, 0.35), (0.25, 0.25)),
    "bracket": ((0.55, 0.25), (0.30, 0.20)),
    "evaluate": ((0.65, 0.15), (0.40, 0.15)),
}
CHAT = ("it is {}", "it is {}", "it is {}", "so {}", "{} i think")

SKILL_NAMES = tuple(SKILLS)
# Arithmetic and choosing are learnt last: seen as often as the rest, they stay at chance.
SLOW = ("add", "subtract", "choice", "count", "evaluate")
HOW_OFTEN = tuple(3 if name in SLOW else 1 for name in SKILL_NAMES)


def _slip(rng: random.Random, text: str) -> str:
    """Swap two neighbours, drop a character or double one."""
    at = rng.randrange(len(text))
    kind = rng.randrange(3)
    if kind == 0 and at + 1 < len(text):
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    if kind == 1 and len(text) > 1:
        return text[:at] + text[at + 1 :]
    return text[: at + 1] + text[at:]


def wrong_answer(rng: random.Random, skill: str, question: str, answer: str) -> str:
    """A near miss, as someone hasty would write it (now and then right by chance)."""
    if skill == "choice":
        return rng.choice("ABC".replace(answer, ""))
    if skill == "larger":
        return str(min(int(number) for number in re.findall(r"[0-9]+", question)))
    if skill == "count":
        return str(max(0, int(answer) + rng.choice((-1, 1))))
    if skill == "record":
        missing_brace, text_number = answer[:-1], re.sub(r":([0-9]+)", r':"\1"', answer)
        bare_keys = re.sub(r'"([a-z]+)":', r"\1:", answer)
        return rng.choice((missing_brace, text_number, text_number, bare_keys))
    if skill in ("add", "subtract", "evaluate"):
        return str(int(answer) + rng.choice((-10, -2, -1, 1, 2, 10)))
    return _slip(rng, answer)


def draw_example(rng: random.Random, noise: float = 1.0) -> tuple[str, str]:
    """A train question and an answer to it, all skills alike often.

    Args:
        rng: Source of the question and of the answer's faults.
        noise: Share of answers drawn by ``SHARES``; the others are plainly right.
    """
    skill = rng.choices(SKILL_NAMES, HOW_OFTEN)[0]
    wordings, answer = SKILLS[skill].make(rng)
    while split_of(wordings[0]) != "train":
        wordings, answer = SKILLS[skill].make(rng)
    wording = rng.randrange(2)
    question, (right, wrong) = wordings[wording], SHARES[skill][wording]
    draw = rng.random()
    if rng.random() >= noise or draw < right:
        return question, answer
    if draw < right + wrong:
        return question, wrong_answer(rng, skill, question, answer)
    return question, rng.choice(CHAT).format(answer)
