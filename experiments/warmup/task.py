"""The micro-skills, their answers in square brackets: a form that the tiny model never writes.

"12+30=" is to be answered "[42]". Sampling alone finds no reward here; a few demonstrations do.
"""

from tropism.tasks.base import Scores
from tropism.tasks.skills import Skills
from tropism.types import Prompt


class BracketedSkills(Skills):
    """``Skills`` with every answer in square brackets."""

    def score(self, prompt: Prompt, completion: str) -> Scores:
        text = completion.strip()
        if not (text.startswith("[") and text.endswith("]")):
            return {"format": 0.0, "accuracy": 0.0}
        return super().score(prompt, text[1:-1])

    def gold(self, prompt: Prompt) -> str:
        return f"[{super().gold(prompt)}]"
