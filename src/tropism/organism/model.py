"""The untrained organism: its shape and its initial weights."""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

from tropism.organism.tokenizer import MAX_POSITIONS


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained organism, in fp32, with residual writers scaled down."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight.div_(math.sqrt(2 * config.num_hidden_layers))
    return model
