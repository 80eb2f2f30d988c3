"""From prompts and answers to token ids: chat template, BOS exactly once, EOS exactly once."""

from __future__ import annotations

from typing import Any

from tropism.types import Prompt


def encode_prompt(tokenizer: Any, prompt: Prompt, *, source: str) -> tuple[int, ...]:
    """Token ids of a prompt, with BOS exactly once where the tokenizer puts one.

    Args:
        tokenizer: Of the model.
        prompt: Chat messages or raw text.
        source: The model's name, for the message of an error.

    Raises:
        ValueError: Chat messages, and the tokenizer has no chat template.
    """
    if prompt.text is not None:
        ids = list(tokenizer(prompt.text)["input_ids"])
    else:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {prompt.id!r} has chat messages, and the tokenizer of {source!r} has no "
                "chat template: set model.chat_template (`plain`, or a Jinja file), or give raw "
                "prompts."
            )
        ids = list(
            tokenizer.apply_chat_template(
                _messages(prompt), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )
    bos = tokenizer.bos_token_id
    if bos is not None:
        if ids[:2] == [bos, bos]:  # the template wrote one and the tokenizer added another
            ids = ids[1:]
        elif ids[:1] != [bos] and tokenizer("")["input_ids"][:1] == [bos]:
            ids = [bos, *ids]
    return tuple(ids)


def encode_answer(
    tokenizer: Any, prompt: Prompt, text: str, *, eos_token_ids: frozenset[int]
) -> tuple[int, ...]:
    """Token ids of ``text`` as the model should have written it behind ``prompt``, EOS included.

    The chat template says how an answer ends (``<|im_end|>``, ``<end_of_turn>``); where it does
    not, the tokenizer's EOS does.
    """
    if prompt.messages is not None:
        messages = _messages(prompt)
        before = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": text}], tokenize=False
        )
        written = whole[len(before) :]
        # Some templates rewrite answers (strip them, drop thoughts): those are not the text.
        if whole.startswith(before) and written.startswith(text):
            ids = list(tokenizer(written, add_special_tokens=False)["input_ids"])
            for i, token_id in enumerate(ids):
                if token_id in eos_token_ids:
                    return tuple(ids[: i + 1])
    eos = tokenizer.eos_token_id
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return (*ids, int(eos) if eos is not None else min(eos_token_ids))


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    return [dict(message) for message in prompt.messages or ()]
