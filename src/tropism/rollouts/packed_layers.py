"""One decoding step of Llama-like layers without transformers' modules.

With 16 rows a step is a thousand small operations, and calling modules costs as much as they do.
Here q, k and v are one product, rotation runs over q and k at once from a table, and a group's
prompt is attended to once for all its rows. All else is in ``LlamaDecoderLayer``'s order: results
differ from it by the rounding of attention. Every other family goes through its modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
    query_key_value: PackedLinear
    output: PackedLinear
    mlp_norm: Any
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear


class PackedLayers:
    """The decoder between embeddings and head, for one token of each row.

    Args:
        policy: Shown merged; its weights are packed now, so build anew after an update.
        num_rows: Rows that the packing is best for.
        num_positions: Longest prompt and completion together.
    """

    def __init__(self, policy: Policy, *, num_rows: int, num_positions: int) -> None:
        decoder = policy.base.get_decoder()
        sites = {site.name: site for site in policy.sites}
        names = {module: name for name, module in policy.base.named_modules()}

        def packed(*modules: Any) -> PackedLinear:
            chosen = [sites[names[module]] for module in modules]
            biases = [policy.bias(site) for site in chosen]
            return PackedLinear(
                torch.cat([policy.weight(site) for site in chosen]),
                None if biases[0] is None else torch.cat([b for b in biases if b is not None]),
                num_rows=num_rows,
            )

        self.layers = [
            _Layer(
                attention_norm=layer.input_layernorm,
                query_key_value=packed(
                    layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
                ),
                output=packed(layer.self_attn.o_proj),
                mlp_norm=layer.post_attention_layernorm,
                gate=packed(layer.mlp.gate_proj),
                up=packed(layer.mlp.up_proj),
                down=packed(layer.mlp.down_proj),
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
            heads = layer.query_key_value(layer.attention_norm(hidden))
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


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, H, D], with the signs of the rotation in ``sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(swapped * sin)
