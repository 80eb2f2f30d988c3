"""Attention over prompts that are laid down once, with their completions end to end behind them.

A pack holds, for each prompt, its tokens and then those of its completions. Every completion sees
the prompt and itself, and nothing else; what flows back into the prompt is the sum over them. No
token is padded outside of this file, where completions of a prompt stand side by side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from tropism.types import Group

MAX_SCORES = 1 << 25  # attention weights that the backward holds at a time: 128 MB in fp32


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    groups: tuple[Group, ...],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attention of a pack.

    Args:
        query: [S, H, D]; ``key`` and ``value`` are [S, H_kv, D]; rotated already.
        groups: Where prompts and completions lie in S, in order and without gaps.
        scaling: Of the scores; 1 / sqrt(D) where None.
        window: Tokens that a token sees, itself included; all before it where None.

    Returns:
        [S, H, D].
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for group in groups:
        end = group.start + group.prompt_length
        prompt_query, prompt_key, prompt_value = (
            part[group.start : end, None] for part in (query, key, value)
        )  # (S_p, 1, ., D)
        attended = _causal(prompt_query, prompt_key, prompt_value, scaling, window)
        outputs.append(attended[:, 0])
        lengths = [length for length in group.lengths if length > 0]
        if lengths:
            stop = end + sum(lengths)
            row_query, row_key, row_value = (
                pad_sequence(list(part[end:stop].split(lengths))) for part in (query, key, value)
            )  # (T, M, ., D)
            seen_key = torch.cat([prompt_key.expand(-1, len(lengths), -1, -1), row_key])
            seen_value = torch.cat([prompt_value.expand(-1, len(lengths), -1, -1), row_value])
            attended = _causal(row_query, seen_key, seen_value, scaling, window)
            outputs += [attended[:length, i] for i, length in enumerate(lengths)]
    return torch.cat(outputs)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """M rows of [T, M, H, D] queries over [S + T, M, H_kv, D] keys, the first S of all before them.

    Query heads that share keys are folded into the query length, so that keys are not repeated.
    """
    length, num_rows, num_heads, width = query.shape
    num_shared = key.shape[2]
    folded = query.view(length, num_rows, num_shared, -1, width).permute(1, 2, 3, 0, 4)
    num_folds = folded.shape[2]
    mask = _mask(length, key.shape[0] - length, num_folds, window, query.device)
    output = _attend(
        folded.reshape(num_rows, num_shared, num_folds * length, width),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        mask,
        scaling,
    )
    unfolded = output.view(num_rows, num_shared, num_folds, length, -1).permute(3, 0, 1, 2, 4)
    return unfolded.reshape(length, num_rows, num_heads, -1)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept here may serve a backward later
def _mask(
    length: int, prompt_length: int, num_folds: int, window: int | None, device: torch.device
) -> Tensor:
    """[num_folds * T, S + T] bool: what each query sees."""
    visible = torch.ones(length, prompt_length + length, dtype=torch.bool, device=device)
    visible = visible.tril(prompt_length)
    if window is not None:
        visible = visible.triu(prompt_length - window + 1)
    return visible.repeat(num_folds, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """[M, H_kv, Q, D] over [M, H_kv, K, D]."""
    is_low = query.dtype.itemsize < 4
    if query.device.type == "cpu" and is_low and torch.is_grad_enabled() and query.requires_grad:
        output: Tensor = _WithProducts.apply(  # type: ignore[no-untyped-call]
            query, key, value, mask, scaling
        )
        return output
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


class _WithProducts(torch.autograd.Function):
    """SDPA with its backward as plain products: twice as fast as the fused one on CPUs."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scaling = scaling
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        per_row = query.shape[1] * query.shape[2] * key.shape[2]
        size = max(1, MAX_SCORES // per_row)
        parts = [
            _backward(*part, ~mask, ctx.scaling)
            for part in zip(
                query.split(size), key.split(size), value.split(size), grad.split(size), strict=True
            )
        ]
        gradients = [torch.cat(part) for part in zip(*parts, strict=True)]
        return *gradients, None, None


def _backward(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, hidden: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for query, key and value; scores and softmax in fp32, the rest in their dtype."""
    scores = torch.matmul(query.float() * scaling, key.float().mT)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    toward = torch.matmul(grad.float(), value.float().mT)
    # d scores = weights * (toward - sum(weights * toward)), in one sweep
    low = torch._softmax_backward_data(toward, weights, -1, torch.float32).to(query.dtype)
    grad_query = torch.matmul(low, key).mul_(scaling)
    grad_key = torch.matmul(low.mT, query).mul_(scaling)
    grad_value = torch.matmul(weights.to(query.dtype).mT, grad)
    return grad_query, grad_key, grad_value
