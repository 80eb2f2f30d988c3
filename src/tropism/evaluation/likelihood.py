"""How likely a model finds given continuations of a prompt.

1. Prompt and continuation are tokenised together, as text that a model would meet: cut at the
   boundary, "Answer:" and " B" may be other tokens than in "Answer: B".
2. Where a token spans the boundary, all options of the prompt are scored from the last place that
   the tokens of all of them and of the prompt share. The same words of the prompt are then part of
   each score.
3. Rows are padded on the right, where a causal model does not look. Options that differ in their
   last token only, as letters do, share one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tropism.objective.logprobs import selected_logprobs
from tropism.policy import Policy
from tropism.tasks.base import Options
from tropism.types import Prompt

MAX_TOKENS_PER_BATCH = 8_192


@dataclass(frozen=True)
class OptionLogprobs:
    """Log-probabilities of a prompt's options, in nats and at temperature 1.

    Args:
        sums: [num_options] of all tokens of each.
        counts: [num_options] number of those tokens.
    """

    sums: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def per_token(self) -> tuple[float, ...]:
        """[num_options] mean over tokens, which does not favour short options."""
        return tuple(total / count for total, count in zip(self.sums, self.counts, strict=True))


@dataclass(frozen=True)
class _Continuation:
    """Tokens of prompt and option, and where those that are scored begin."""

    ids: tuple[int, ...]
    start: int


def option_logprobs(
    policy: Policy,
    prompts: Sequence[Prompt],
    options: Sequence[Options],
    *,
    max_tokens: int = MAX_TOKENS_PER_BATCH,
) -> list[OptionLogprobs]:
    """Log-likelihood of each option behind its prompt.

    Args:
        policy: Whose probabilities.
        prompts: [P] as they would be answered, chat template included.
        options: [P] continuations of each.
        max_tokens: Of one forward, padding included; a longer row runs alone.

    Returns:
        [P] sums and token counts.

    Raises:
        ValueError: A prompt with an option is longer than the model's context.
    """
    found = [
        _continuations(policy, prompt, one) for prompt, one in zip(prompts, options, strict=True)
    ]
    wanted: dict[tuple[int, ...], list[_Continuation]] = {}  # by what runs through the model
    for one in (one for of_prompt in found for one in of_prompt):
        wanted.setdefault(one.ids[:-1], []).append(one)
    sums: dict[_Continuation, float] = {}
    for rows in _batches(sorted(wanted, key=len), max_tokens):
        sums.update(_sums(policy, rows, wanted))
    return [
        OptionLogprobs(
            tuple(sums[one] for one in of_prompt),
            tuple(len(one.ids) - one.start for one in of_prompt),
        )
        for of_prompt in found
    ]


def _continuations(policy: Policy, prompt: Prompt, options: Options) -> list[_Continuation]:
    text = prompt.text
    if text is None:
        messages = [dict(message) for message in prompt.messages or ()]
        text = policy.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    before = policy.encode(prompt)
    wholes = [
        policy.encode(Prompt(id=prompt.id, task=prompt.task, text=text + option))
        for option in options.texts
    ]
    if (longest := max(map(len, wholes))) > policy.context_length:
        raise ValueError(
            f"prompt {prompt.id!r} with an option has {longest} tokens, the model's context is "
            f"{policy.context_length}: leave it out, or take a model with a longer one."
        )
    # The very first token has nothing that could predict it.
    start = max(1, min(_num_shared(before, whole) for whole in wholes))
    return [_Continuation(whole, start) for whole in wholes]


def _num_shared(before: Sequence[int], whole: Sequence[int]) -> int:
    for i, (one, other) in enumerate(zip(before, whole, strict=False)):
        if one != other:
            return i
    return min(len(before), len(whole) - 1)


def _batches(rows: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Rows in the order of their lengths, together as long as their rectangle is small enough."""
    batches: list[list[tuple[int, ...]]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * len(row) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@torch.no_grad()
def _sums(
    policy: Policy,
    rows: Sequence[tuple[int, ...]],
    wanted: dict[tuple[int, ...], list[_Continuation]],
) -> dict[_Continuation, float]:
    input_ids = torch.full((len(rows), len(rows[-1])), policy.pad_token_id)  # the last is longest
    for i, row in enumerate(rows):
        input_ids[i, : len(row)] = torch.tensor(row)
    was_training = policy.model.training
    policy.model.eval()
    try:
        output = policy.base.get_decoder()(input_ids=input_ids.to(policy.device), use_cache=False)
    finally:
        policy.model.train(was_training)
    states = output.last_hidden_state  # (M, S, D)
    each = [(i, one) for i, row in enumerate(rows) for one in wanted[row]]
    hidden = torch.cat([states[i, one.start - 1 : len(one.ids) - 1] for i, one in each])  # (N, D)
    targets = torch.tensor([token for _, one in each for token in one.ids[one.start :]])
    logprobs, _ = selected_logprobs(
        hidden, targets.to(policy.device), head=policy.head, temperature=1.0
    )
    parts = logprobs.double().split([len(one.ids) - one.start for _, one in each])
    return {one: float(part.sum()) for (_, one), part in zip(each, parts, strict=True)}
