"""The organism's tokenizer: one token a character, and a chat template with exactly one BOS.

Encoding adds no special token, so that a rendered chat is tokenized as it stands; text outside the
vocabulary becomes ``<unk>``, one a character.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MAX_POSITIONS = 512
SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer; ids 0-6 are special, and ``<|end|>`` ends a turn and a sequence."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that holds the chat template."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # transformers 5 writes its own name of the class, which transformers 4 does not know.
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
