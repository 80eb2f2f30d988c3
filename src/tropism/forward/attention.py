"""The attention that loaded models use, in the place where transformers lets users put their own.

Decoding: stock SDPA repeats keys and values for each query head of a group and, with a single
query, spends most of its time on copies. Queries of one token that share keys are folded into the
query length: the same but for rounding, six times faster on a CPU. Training: packs, see
``grouped_attention``.
All else is transformers' own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tropism.forward.grouped_attention import grouped_attention
from tropism.types import Group

NAME = "tropism"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    groups: tuple[Group, ...] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The attention module of a layer.
        query: [B, H, T, D]; ``key`` and ``value`` are [B, H_kv, S, D].
        attention_mask: [B, 1, T, S] bool, or None.
        sliding_window: Tokens that a token sees; in the mask already, but for packs.
        groups: Layout of a pack (B = 1), which replaces the mask.

    Returns:
        [B, T, H, D], and None where other implementations give their weights.
    """
    if groups is not None:
        packed = (part[0].transpose(0, 1) for part in (query, key, value))
        output = grouped_attention(*packed, groups=groups, scaling=scaling, window=sliding_window)
        return output[None], None
    if query.shape[2] == 1 and not query.requires_grad:
        return _attend_once(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **options
    )


def _attend_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """One query per row: [B, H, 1, D] is [B, H_kv, H / H_kv, D] to the keys that it shares."""
    num_rows, num_heads, _, width = query.shape
    folded = query.reshape(num_rows, key.shape[1], -1, width)
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(num_rows, 1, num_heads, -1)


def register() -> str:
    """Make ``attend`` known to transformers; the name to load models with."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
