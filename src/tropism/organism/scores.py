"""How often the organism is right: greedy and sampled, by skill, on validation questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tropism.evaluation.statistics import wilson_interval
from tropism.tasks.skills import Skills
from tropism.types import Prompt

MAX_NEW_TOKENS = 40


@torch.inference_mode()
def answers(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    *,
    should_sample: bool,
    num_samples: int = 1,
    batch_size: int = 100,
) -> list[list[str]]:
    """``num_samples`` answers of a causal model a prompt, at temperature 1 or greedy.

    Sampling draws from torch's global generator.
    """
    texts: list[list[str]] = []
    for start in range(0, len(prompts), batch_size):
        chats = [
            [dict(message) for message in prompt.messages or ()]
            for prompt in prompts[start : start + batch_size]
        ]
        inputs: Any = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        how: dict[str, Any] = {"do_sample": False}
        if should_sample:
            how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        generated = model.generate(
            **inputs, **how, max_new_tokens=MAX_NEW_TOKENS, num_return_sequences=num_samples
        )
        width = inputs["input_ids"].shape[1]
        decoded = tokenizer.batch_decode(generated[:, width:], skip_special_tokens=True)
        texts += [decoded[at : at + num_samples] for at in range(0, len(decoded), num_samples)]
    return texts


def _rate(values: Iterable[float]) -> dict[str, float]:
    """Rate with its Wilson 95 % interval."""
    outcomes = list(values)
    interval = wilson_interval(round(sum(outcomes)), len(outcomes))
    return {
        "n": interval.n,
        "value": round(interval.value, 4),
        "ci_low": round(interval.low, 4),
        "ci_high": round(interval.high, 4),
    }


def score_table(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_prompts: int,
    num_samples: int,
    seed: int,
) -> dict[str, Any]:
    """Greedy and sampled accuracy and form, overall and by skill, and the share of mixed groups.

    Sampled rates count the first sample of each prompt only, so that their intervals hold; a group
    is mixed when some of its ``num_samples`` answers are right and others are not.
    """
    task = Skills()
    prompts = task.prompts("validation", num_prompts, seed)
    torch.manual_seed(seed)
    greedy = answers(model, tokenizer, prompts, should_sample=False)
    sampled = answers(
        model, tokenizer, prompts, should_sample=True, num_samples=num_samples, batch_size=50
    )
    columns: Mapping[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for prompt, [likeliest], group in zip(prompts, greedy, sampled, strict=True):
        greedy_scores = task.score(prompt, likeliest)
        group_scores = [task.score(prompt, text) for text in group]
        right = [scores["accuracy"] for scores in group_scores]
        for row in ("all", prompt.columns["skill"]):
            columns[row]["greedy_accuracy"].append(greedy_scores["accuracy"] or 0.0)
            columns[row]["sampled_accuracy"].append(right[0] or 0.0)
            columns[row]["sampled_format"].append(group_scores[0]["format"] or 0.0)
            columns[row]["mixed_groups"].append(float(len(set(right)) > 1))
    return {
        "split": "validation",
        "num_prompts": num_prompts,
        "num_samples": num_samples,
        "seed": seed,
        "max_new_tokens": MAX_NEW_TOKENS,
        "skills": {
            row: {name: _rate(values) for name, values in measures.items()}
            for row, measures in columns.items()
        },
    }
