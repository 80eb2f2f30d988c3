"""BOS exactly once where the tokenizer or the template puts one, and never behind the prompt."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tropism.organism.tokenizer import CHAT_TEMPLATE, build_tokenizer
from tropism.prompt_encoding import encode_answer, encode_prompt
from tropism.types import Prompt

WITHOUT_BOS = CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
RAW = Prompt(id="raw", task="t", text="1+1=")
CHAT = Prompt(
    id="chat",
    task="t",
    messages=({"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}),
)


def tokenizer_of(*, adds_bos: bool, template_writes_bos: bool) -> Any:
    tokenizer = build_tokenizer()
    if adds_bos:  # as Llama's and Gemma's do, to whatever is encoded
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = CHAT_TEMPLATE if template_writes_bos else WITHOUT_BOS
    return tokenizer


def encoded(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    return encode_prompt(tokenizer, prompt, source="test")


@pytest.mark.fault(13)
@pytest.mark.parametrize("template_writes_bos", [True, False])
@pytest.mark.parametrize(
    "prompt", [RAW, CHAT, Prompt(id="has one", task="t", text="<bos>1+1=")], ids=lambda p: p.id
)
def test_raw_and_chat_prompts_hold_exactly_one(prompt: Prompt, template_writes_bos: bool) -> None:
    tokenizer = tokenizer_of(adds_bos=True, template_writes_bos=template_writes_bos)
    ids = encoded(tokenizer, prompt)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    text = tokenizer.decode(ids[1:])
    assert text.endswith("1+1=" if prompt.messages is None else "1+1=<|end|><|assistant|>")


@pytest.mark.fault(13)
def test_the_template_alone_may_write_it() -> None:
    tokenizer = tokenizer_of(adds_bos=False, template_writes_bos=True)
    assert encoded(tokenizer, CHAT).count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in encoded(tokenizer, RAW)


@pytest.mark.fault(13)
def test_none_where_neither_puts_one() -> None:
    tokenizer = tokenizer_of(adds_bos=False, template_writes_bos=False)
    assert tokenizer.bos_token_id not in encoded(tokenizer, CHAT) + encoded(tokenizer, RAW)


@pytest.mark.fault(13)
@pytest.mark.parametrize("prompt", [RAW, CHAT], ids=lambda p: p.id)
def test_an_answer_has_none_and_ends_with_eos_once(prompt: Prompt) -> None:
    tokenizer = tokenizer_of(adds_bos=True, template_writes_bos=True)
    eos = tokenizer.eos_token_id
    ids = encode_answer(tokenizer, prompt, "2", eos_token_ids=frozenset({eos}))
    assert ids == (*tokenizer("2", add_special_tokens=False)["input_ids"], eos)
