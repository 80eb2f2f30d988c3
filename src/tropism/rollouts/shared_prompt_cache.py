"""Keys and values of completions, and those of their prompts once for the whole group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedPromptCache:
    """What packed layers attend to: each group's prompt, and each row's own tokens.

    Attention over both is the two attentions weighed by their normalisers:
    ``sigmoid(lse_prompt - lse_own)`` goes to the prompt.

    Args:
        prompts: Keys and values [P, H_kv, S, D] of each layer, left-padded.
        mask: [P, S] bool, False on pads; None where there are none.
        group_size: G, rows of each prompt.
        limit: Most tokens of a row.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[Tensor, Tensor]],
        *,
        mask: Tensor | None,
        group_size: int,
        limit: int,
    ) -> None:
        self.prompts, self.group_size = prompts, group_size
        keys = prompts[0][0]
        num_prompts, num_heads, _, width = keys.shape
        shape = (num_prompts * group_size, num_heads, limit, width)
        self.own = [(keys.new_empty(shape), keys.new_empty(shape)) for _ in prompts]
        self.bias: Tensor | None = None
        if mask is not None:
            hidden = ~mask[:, None, None]
            self.bias = torch.zeros_like(hidden, dtype=keys.dtype).masked_fill(hidden, -torch.inf)
        self.slots = torch.arange(shape[0])  # of the rows still held: p * G + g
        self.row_of_slot = torch.arange(shape[0])  # any row where a slot's has left
        self.length = 0

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float
    ) -> Tensor:
        """One token of each row: [B', H, D] to everything before it and itself.

        Args:
            layer: Index.
            query: [B', H, D]; ``key`` and ``value`` are [B', H_kv, D] and are kept. After the last
                layer ``advance`` makes room for the next token.
            scaling: Of the scores.
        """
        num_rows, _, width = query.shape
        own_keys, own_values = self.own[layer]
        own_keys[:, :, self.length] = key
        own_values[:, :, self.length] = value
        seen = self.length + 1
        folded = query.view(num_rows, key.shape[1], -1, width)
        own, own_lse = _attention(
            folded, own_keys[:, :, :seen], own_values[:, :, :seen], None, scaling
        )
        prompt_keys, prompt_values = self.prompts[layer]
        by_prompt = (
            self._to_slots(folded)
            .unflatten(0, (-1, self.group_size))
            .transpose(1, 2)  # (P, H_kv, G, H / H_kv, D)
            .flatten(2, 3)
        )
        shared, shared_lse = _attention(by_prompt, prompt_keys, prompt_values, self.bias, scaling)
        spread, spread_lse = (
            self._from_slots(part.unflatten(2, (self.group_size, -1)).transpose(1, 2).flatten(0, 1))
            for part in (shared, shared_lse)
        )
        weight = torch.sigmoid(spread_lse - own_lse)[..., None]
        return torch.lerp(own.float(), spread.float(), weight).to(query.dtype).flatten(1)

    def _to_slots(self, rows: Tensor) -> Tensor:
        """[B', ...] -> [P * G, ...], with any row where a slot's has left."""
        return rows if len(rows) == len(self.row_of_slot) else rows[self.row_of_slot]

    def _from_slots(self, slots: Tensor) -> Tensor:
        """[P * G, ...] -> [B', ...]."""
        return slots if len(self.slots) == len(slots) else slots[self.slots]

    def advance(self) -> None:
        """All layers have taken the token."""
        self.length += 1

    def keep(self, rows: Tensor) -> None:
        """Let go of all rows but these, in ascending order."""
        kept = []
        for pair in self.own:
            for buffer in pair:
                buffer[: len(rows), :, : self.length] = buffer[rows, :, : self.length]
            kept.append((pair[0][: len(rows)], pair[1][: len(rows)]))
        self.own = kept
        self.slots = self.slots[rows]
        self.row_of_slot = torch.zeros_like(self.row_of_slot)
        self.row_of_slot[self.slots] = torch.arange(len(rows))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """SDPA on a CPU with the log of its normaliser: [N, H, Q, D] and [N, H, Q] fp32."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scaling
    )
    return output, lse
