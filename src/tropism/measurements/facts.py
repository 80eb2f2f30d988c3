"""Facts to trace, from a JSONL file, and where their subjects are among a tokenizer's tokens.

A sample line; the answer stands as it follows the prompt, with its space:

    {"prompt": "The capital city of France is", "subject": "France", "answer": " Paris"}

Models are asked for the answer's first token alone, as in ROME: one of several tokens counts as
known, and is traced, by its first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fact:
    """A sentence's beginning that names a subject, and what a model should go on with.

    Args:
        prompt: Raw text; it names the subject once, and goes on behind it.
        subject: As it stands in the prompt.
        answer: As it follows the prompt, with its space.
    """

    prompt: str
    subject: str
    answer: str

    @property
    def fault(self) -> str | None:
        """What is wrong with it, and the remedy; None where all is right."""
        for name in ("prompt", "subject", "answer"):
            if not getattr(self, name).strip():
                return f"{name} is empty: write one"
        count = self.prompt.count(self.subject)
        if count != 1:
            return (
                f"subject {self.subject!r} stands {count} times in prompt {self.prompt!r}: word it "
                "so that it stands there once, in the same letters"
            )
        if self.prompt.endswith(self.subject):
            return f"prompt {self.prompt!r} ends with its subject: let it go on behind it"
        if self.prompt[-1].isalnum() and self.answer[0].isalnum():
            return (
                f"prompt {self.prompt!r} and answer {self.answer!r} make one word: begin the "
                "answer with a space"
            )
        return None


@dataclass(frozen=True)
class TokenizedFact:
    """A fact as one model sees it.

    Args:
        fact: The words.
        ids: Tokens of the prompt, special ones that the tokenizer puts before it included.
        start: Place of the subject's first token.
        end: Place behind its last token.
        answer_id: The answer's first token.
        num_answer_tokens: How many it has in all.
        texts: The prompt's tokens as text.
    """

    fact: Fact
    ids: tuple[int, ...]
    start: int
    end: int
    answer_id: int
    num_answer_tokens: int
    texts: tuple[str, ...]

    @property
    def traced(self) -> range:
        """Places from the subject on: before it no state depends on the subject."""
        return range(self.start, len(self.ids))

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each traced token.

        The only token of a subject is its last; of two, the second is. The prompt's last token is
        ``last`` even where it comes right behind the subject.
        """
        return tuple(self._role(place) for place in self.traced)

    def _role(self, place: int) -> str:
        if place == self.end - 1:
            return "last subject"
        if place < self.end:
            return "first subject" if place == self.start else "middle subject"
        if place == len(self.ids) - 1:
            return "last"
        return "first subsequent" if place == self.end else "further"


def read_facts(path: str | Path) -> list[Fact]:
    """All facts of a file, in its order; empty lines are passed over.

    Raises:
        ValueError: The file is missing or empty, or a row is malformed; names every such row.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"facts={str(path)!r} does not exist: give a JSONL file of facts.")
    lines = file.read_text(encoding="utf-8").split("\n")
    facts: dict[str, Fact] = {}
    faults = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _parse(line)
        if isinstance(found, Fact) and found.prompt in facts:
            found = f"prompt {found.prompt!r} stood there before: leave out one of the two"
        if isinstance(found, str):
            faults.append(f"line {number}: {found}.")
        else:
            facts[found.prompt] = found
    if faults:
        raise ValueError("\n".join([f"facts={str(path)!r} has {len(faults)} bad rows:", *faults]))
    if not facts:
        raise ValueError(f"facts={str(path)!r} is empty: write at least one fact.")
    return list(facts.values())


def _parse(line: str) -> Fact | str:
    """The fact of a line, or what is wrong with it."""
    names = [field.name for field in fields(Fact)]
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"it is no JSON ({error}): write one object"
    if not isinstance(row, dict) or sorted(row) != sorted(names):
        return f"it is no object with {', '.join(names)} and nothing else: write these three"
    if not all(isinstance(value, str) for value in row.values()):
        return "a value is no text: put it in quotation marks"
    fact = Fact(**row)
    return fact.fault or fact


def tokenize(facts: Iterable[Fact], tokenizer: Any) -> list[TokenizedFact]:
    """The facts as a model's tokens.

    Args:
        facts: From ``read_facts``.
        tokenizer: A fast one, which knows where its tokens stand in the text.

    Raises:
        ValueError: The tokenizer is a slow one, or joins prompt and answer into one token.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say where tokens stand in the text: tracing "
            "needs a fast tokenizer (tokenizer.json)."
        )
    return [_tokenize(fact, tokenizer) for fact in facts]


def _tokenize(fact: Fact, tokenizer: Any) -> TokenizedFact:
    encoded = tokenizer(fact.prompt, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    whole = tokenizer(fact.prompt + fact.answer)["input_ids"]
    answer = whole[len(ids) :]
    if whole[: len(ids)] != ids or not answer:
        raise ValueError(
            f"prompt {fact.prompt!r} and answer {fact.answer!r} share a token of this tokenizer: "
            "move the space between them to the answer, or word them otherwise."
        )
    low = fact.prompt.index(fact.subject)
    high = low + len(fact.subject)
    own = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < high and b > low]
    if own[-1] == len(ids) - 1:
        raise ValueError(
            f"prompt {fact.prompt!r} ends with the token that ends its subject: let it go on."
        )
    return TokenizedFact(
        fact=fact,
        ids=tuple(ids),
        start=own[0],
        end=own[-1] + 1,
        answer_id=answer[0],
        num_answer_tokens=len(answer),
        texts=tuple(tokenizer.decode([i]) for i in ids),
    )
