"""Training prompts that a run is also evaluated on: found by the words that they share.

1. A training prompt is contaminated by a held-out one where both hold the same run of 13 words.
   Runs of fewer than 8 different words do not count: rows of grids and of numbers meet by chance.
2. Whatever has no such run, short questions above all, is contaminated where the whole texts are
   equal but for case and white space.
3. Words are compared without case, punctuation and Unicode form. System messages are left out.
4. The wording that all prompts of a task share is no contamination: a run of 8 words that stands in
   more than 5 of a task's prompts, and in more than 0.25 % of them, is template, and a run of 13
   with a word of it does not count. What is copied into more prompts than that looks like
   template, and is found only where rule 2 finds it.

After Brown et al. 2020 (2005.14165, appendix C), who drop runs of 13 words and pass over those that
more than 10 documents share. Linear in the number of words. Languages written without spaces have
few "words" in this sense, so that there only rule 2 finds much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tropism.tasks.structured_echo import words
from tropism.types import Prompt

Decontaminate = Literal["drop", "warn", "off"]

RUN = 13
MIN_DIFFERENT_WORDS = 8
TEMPLATE_RUN = 8
MIN_TEMPLATE_PROMPTS = 5
MIN_TEMPLATE_SHARE = 0.0025
ENOUGH_FOR_TEMPLATE = 4096
"""So many prompts of a task show its template; with fewer, more are drawn before one is dropped."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: no power of it loses a bit of a word's hash
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Leak:
    """A training prompt that shares text with a held-out one.

    Args:
        prompt_id: Of the training prompt.
        held_out_id: Of the first held-out prompt that has the text too.
        place: Where that one belongs: ``test of gsm8k``.
        text: What they share: 13 words, or the beginning of the whole text.
    """

    prompt_id: str
    held_out_id: str
    place: str
    text: str


class HeldOutTexts:
    """Everything that a run is evaluated on, indexed.

    Args:
        places: Name of a split or benchmark -> its prompts.
    """

    def __init__(self, places: Mapping[str, Sequence[Prompt]]) -> None:
        self._owners: list[tuple[str, str]] = []  # (place, prompt id)
        self._whole: dict[str, int] = {}
        self._runs: dict[int, int] = {}
        for place, prompts in places.items():
            hashed = [_hashed(words(question_text(prompt))) for prompt in prompts]
            template = _template(hashed)
            for prompt, hashes in zip(prompts, hashed, strict=True):
                owner = len(self._owners)
                self._owners.append((place, prompt.id))
                self._whole.setdefault(_whole(prompt), owner)
                runs = _runs(hashes, RUN)[_is_countable(hashes, template)]
                for run in runs.tolist():
                    self._runs.setdefault(run, owner)

    def leaks(
        self, prompts: Sequence[Prompt], more: Callable[[], Iterable[Prompt]] = tuple
    ) -> list[Leak]:
        """The contaminated ones of a task's training prompts, in their order.

        Args:
            prompts: Training prompts of one task.
            more: Gives further training prompts of the task, from which its template is learnt
                where ``prompts`` are few; called only when something was found.
        """
        texts = {prompt.id: words(question_text(prompt)) for prompt in prompts}
        hashed = {prompt_id: _hashed(text) for prompt_id, text in texts.items()}
        template = _template(hashed.values())
        leaks = self._find(prompts, texts, hashed, template)
        if leaks and len(prompts) < ENOUGH_FOR_TEMPLATE:
            others = [_hashed(words(question_text(p))) for p in more() if p.id not in texts]
            template |= _template([*hashed.values(), *others])
            leaks = self._find(prompts, texts, hashed, template)
        return leaks

    def _find(
        self,
        prompts: Sequence[Prompt],
        texts: Mapping[str, list[str]],
        hashed: Mapping[str, Hashes],
        template: set[int],
    ) -> list[Leak]:
        leaks = []
        for prompt in prompts:
            owner = self._whole.get(_whole(prompt))
            text = question_text(prompt)[:100]
            if owner is None:
                found = self._shared_run(texts[prompt.id], hashed[prompt.id], template)
                if found is None:
                    continue
                owner, text = found
            place, held_out_id = self._owners[owner]
            leaks.append(Leak(prompt.id, held_out_id, place, text))
        return leaks

    def _shared_run(
        self, text: Sequence[str], hashes: Hashes, template: set[int]
    ) -> tuple[int, str] | None:
        """The first run that counts and is held out: its owner and its words."""
        found = [i for i, run in enumerate(_runs(hashes, RUN).tolist()) if run in self._runs]
        if not found:
            return None
        is_countable = _is_countable(hashes, template)
        for i in found:
            run = text[i : i + RUN]
            if is_countable[i] and len(set(run)) >= MIN_DIFFERENT_WORDS:
                return self._runs[int(_runs(hashes[i : i + RUN], RUN)[0])], " ".join(run)
        return None


def question_text(prompt: Prompt) -> str:
    """What a prompt says, without its system messages."""
    if prompt.text is not None:
        return prompt.text
    assert prompt.messages is not None
    return "\n".join(m["content"] for m in prompt.messages if m["role"] != "system")


def _whole(prompt: Prompt) -> str:
    return " ".join(question_text(prompt).casefold().split())


def _hashed(text: Sequence[str]) -> Hashes:
    """[N] a hash for each word, the same within this process."""
    return np.array([hash(word) for word in text], dtype=np.int64).view(np.uint64)


def _runs(hashes: Hashes, length: int) -> Hashes:
    """[N - length + 1] a hash for each run of ``length`` words (a polynomial modulo 2^64)."""
    num = max(len(hashes) - length + 1, 0)
    runs = np.zeros(num, dtype=np.uint64)
    for i in range(length if num else 0):
        runs = runs * _FACTOR + hashes[i : i + num]
    return runs


def _template(texts: Iterable[Hashes]) -> set[int]:
    """Hashes of the runs of ``TEMPLATE_RUN`` words that belong to a task's template."""
    runs = [np.unique(_runs(text, TEMPLATE_RUN)) for text in texts]
    if not runs:
        return set()
    values, counts = np.unique(np.concatenate(runs), return_counts=True)
    least = max(MIN_TEMPLATE_PROMPTS, MIN_TEMPLATE_SHARE * len(runs))
    return set(values[counts > least].tolist())


def _is_countable(hashes: Hashes, template: set[int]) -> NDArray[np.bool_]:
    """[N - RUN + 1] whether the run of ``RUN`` words from here holds no word of the template."""
    num = max(len(hashes) - RUN + 1, 0)
    is_own = np.ones(len(hashes), dtype=bool)
    for i, run in enumerate(_runs(hashes, TEMPLATE_RUN).tolist()):
        if run in template:
            is_own[i : i + TEMPLATE_RUN] = False
    countable = np.ones(num, dtype=bool)
    for i in range(RUN if num else 0):
        countable &= is_own[i : i + num]
    return countable
