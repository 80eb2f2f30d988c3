"""One decoding step of Llama-like layers without transformers' modules.

With 16 rows a step is a thousand small operations, and calling modules costs as much as they do.
Here rotation runs over q and k at once from a table, and a group's prompt is attended to once for
all its rows. All else is in ``LlamaDecoderLayer``'s order: results differ from it by the rounding
of attention. Every other family goes through its modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn.functional import silu

from tropism.forward.packed_linear import PackedLinear, can_pack
from tropism.policy import Policy
from tropism.rollouts.shared_prompt_cache import SharedPromptCache

KNOWN_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}


@dataclass(frozen=True)
class _Layer:
    """Packed weights of one layer."""

    attention_norm: Any
    query_key_value: tuple[PackedLinear, PackedLinear, PackedLinear]
    output: PackedLinear
    mlp_norm: Any
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear


class PackedLayers:
    """The decoder between embeddings and head, for one token of each row.

    Args:
        policy: Shown merged and packed; what is built here is good for as long as that lasts.
        num_positions: Longest prompt and completion together.
    """

    def __init__(self, policy: Policy, *, num_positions: int) -> None:
        decoder = policy.base.get_decoder()
        self.layers = [
            _Layer(
                attention_norm=layer.input_layernorm,
                query_key_value=(
                    _packed(layer.self_attn.q_proj),
                    _packed(layer.self_attn.k_proj),
                    _packed(layer.self_attn.v_proj),
                ),
                output=_packed(layer.self_attn.o_proj),
                mlp_norm=layer.post_attention_layernorm,
                gate=_packed(layer.mlp.gate_proj),
                up=_packed(layer.mlp.up_proj),
                down=_packed(layer.mlp.down_proj),
            )
            for layer in decoder.layers
        ]
        self.embedding, self.norm, self.head = decoder.embed_tokens, decoder.norm, policy.head
        attention = decoder.layers[0].self_attn
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        config = policy.base.config
        self.num_heads, self.num_key_heads = config.num_attention_heads, config.num_key_value_heads
        positions = torch.arange(num_positions)[None]
        cos, sin = decoder.rotary_emb(self.embedding.weight[:1, None], positions)
        half = self.head_dim // 2
        self.cos = cos[0, :, None]  # (positions, 1, D)
        # rotate_half(x) * sin == swap(x) * (-sin, sin)
        self.sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[0, :, None]

    @staticmethod
    def fit(policy: Policy) -> bool:
        """Whether this model's layers are known, and its weights can be packed."""
        decoder = policy.base.get_decoder()
        layers = getattr(decoder, "layers", [])
        config = policy.base.config
        return (
            len(layers) > 0
            and all(type(layer).__name__ in KNOWN_LAYERS for layer in layers)
            and all(can_pack(policy.weight(site)) for site in policy.sites)
            and getattr(decoder, "has_sliding_layers", False) is False
            and getattr(config, "sliding_window", None) is None
            and type(getattr(decoder, "embed_tokens", None)) is torch.nn.Embedding
            and "dynamic" not in str(getattr(config, "rope_parameters", ""))
            and "longrope" not in str(getattr(config, "rope_parameters", ""))
            and config.hidden_act == "silu"
        )

    def step(self, tokens: Tensor, positions: Tensor, cache: SharedPromptCache) -> Tensor:
        """Next-token logits [B, V] after tokens [B], which ``cache`` takes, at positions [B]."""
        hidden: Tensor = self.embedding(tokens)  # (B, D)
        num_rows = len(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        num_rotated = self.num_heads + self.num_key_heads
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(hidden)
            heads = torch.cat([product(normed) for product in layer.query_key_value], dim=-1)
            heads = heads.view(num_rows, -1, self.head_dim)
            turned = _rotated(heads[:, :num_rotated], cos, sin)
            attended = cache.attend(
                index,
                turned[:, : self.num_heads].contiguous(),
                turned[:, self.num_heads :],
                heads[:, num_rotated:],
                scaling=self.scaling,
            )
            hidden = hidden + layer.output(attended)
            normed = layer.mlp_norm(hidden)
            hidden = hidden + layer.down(silu(layer.gate(normed)) * layer.up(normed))
        cache.advance()
        return self.head(self.norm(hidden))


def _packed(linear: Any) -> PackedLinear:
    """What a linear computes with inside ``Policy.merged(num_rows=...)``."""
    base = linear.get_base_layer() if isinstance(linear, LoraLayer) else linear
    assert isinstance(base.forward, PackedLinear)
    return base.forward


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, H, D], with the signs of the rotation in ``sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(swapped * sin)
