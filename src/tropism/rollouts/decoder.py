"""Next-token logits for many completions at once: the prompts first, then token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tropism.policy import Policy
from tropism.rollouts import kv_cache
from tropism.rollouts.packed_layers import PackedLayers
from tropism.rollouts.shared_prompt_cache import SharedPromptCache


class Decoder:
    """Prefills each prompt once for its whole group, and goes on token by token.

    Attributes:
        logits: [B, V] of the first token of each completion.

    Args:
        policy: Shown merged.
        prompts: Token ids of P prompts.
        group_size: G; B = P * G.
        limit: Most tokens of a completion.
        packed: Runs the steps where the model's layers are known to it.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[tuple[int, ...]],
        *,
        group_size: int,
        limit: int,
        packed: PackedLayers | None,
    ) -> None:
        width = max(len(ids) for ids in prompts)
        # Left-padded, so that all prompts end at the same position.
        input_ids = torch.full((len(prompts), width), policy.pad_token_id)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, ids in enumerate(prompts):
            input_ids[i, width - len(ids) :] = torch.tensor(ids)
            mask[i, width - len(ids) :] = 1
        input_ids, mask = input_ids.to(policy.device), mask.to(policy.device)
        output = policy.base(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=kv_cache.new_cache(policy.base.config),
            use_cache=True,
            logits_to_keep=1,
        )
        rows = torch.arange(len(prompts), device=policy.device).repeat_interleave(group_size)
        self.logits: Tensor = output.logits[rows, -1]
        self._positions = mask.sum(dim=1)[rows]  # of the next token
        self._steps: _Steps
        if packed is not None:
            self._steps = _PackedSteps(packed, output.past_key_values, mask, group_size, limit)
        else:
            self._steps = _ModuleSteps(policy, output.past_key_values, mask, rows, limit)

    def step(self, tokens: Tensor) -> Tensor:
        """[B', V] next-token logits after ``tokens`` [B']."""
        logits = self._steps.step(tokens, self._positions)
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Let go of all rows but these [B''], in ascending order."""
        self._steps.keep(rows)
        self._positions = self._positions[rows]


class _Steps(Protocol):
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    def keep(self, rows: Tensor) -> None: ...


class _ModuleSteps:
    """Through the model's own modules, of any family."""

    def __init__(self, policy: Policy, cache: Any, mask: Tensor, rows: Tensor, limit: int) -> None:
        kv_cache.spread(cache, rows, limit)
        self._base, self._cache = policy.base, cache
        self._mask = torch.cat([mask[rows], mask.new_ones(len(rows), limit)], dim=1)
        self._width = mask.shape[1]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self._width += 1
        output = self._base(
            input_ids=tokens[:, None],
            attention_mask=self._mask[:, : self._width],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        kv_cache.keep(self._cache, rows)
        self._mask = self._mask[rows]


class _PackedSteps:
    """Through packed layers."""

    def __init__(
        self, packed: PackedLayers, cache: Any, mask: Tensor, group_size: int, limit: int
    ) -> None:
        self._packed = packed
        self._cache = SharedPromptCache(
            [(layer.keys, layer.values) for layer in cache.layers],
            mask=None if bool(mask.all()) else mask.bool(),
            group_size=group_size,
            limit=limit,
        )

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._packed.step(tokens, positions, self._cache)

    def keep(self, rows: Tensor) -> None:
        self._cache.keep(rows)
