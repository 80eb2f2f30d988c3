"""Attention of packs against attention with one dense mask over the whole pack."""

import pytest
import torch

from tropism.forward import grouped_attention as room
from tropism.forward.grouped_attention import grouped_attention
from tropism.types import Group

# Completions of length 0 are single tokens: only predicted, nothing of them runs.
GROUPS = (Group(0, 5, (3, 0, 1, 4)), Group(13, 2, (0,)), Group(15, 1, (2, 2)), Group(20, 4, (6,)))
NUM_TOKENS = 30
WIDTH = 8


def visible(groups, window):
    """[S, S] bool, from the owner and the position of each token."""
    owners, positions = [], []
    for index, group in enumerate(groups):
        assert group.start == len(owners)
        owners += [(index, None)] * group.prompt_length
        positions += range(group.prompt_length)
        for row, length in enumerate(group.lengths):
            owners += [(index, row)] * length
            positions += range(group.prompt_length, group.prompt_length + length)
    mask = torch.zeros(len(owners), len(owners), dtype=torch.bool)
    for i, (owner, position) in enumerate(zip(owners, positions, strict=True)):
        for j, (other, earlier) in enumerate(zip(owners, positions, strict=True)):
            is_own = other in {owner, (owner[0], None)}
            distance = position - earlier
            mask[i, j] = is_own and 0 <= distance < (window or NUM_TOKENS)
    return mask


def reference(query, key, value, *, groups=GROUPS, scaling=None, window=None):
    """Softmax over all tokens of the pack, those hidden at -inf."""
    num_folds = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(num_folds, dim=1) for part in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~visible(groups, window), float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, value)


def inputs(dtype, *, num_heads=6, num_shared=2):
    torch.manual_seed(0)
    heads = (num_heads, num_shared, num_shared)
    parts = [torch.randn(NUM_TOKENS, num, WIDTH, dtype=dtype) for num in heads]
    return [part.requires_grad_() for part in parts]


def with_gradients(attention, parts, **options):
    """Output, and the gradients for query, key and value of a weighted sum of it."""
    output = attention(*parts, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad((output * weights.to(output)).sum(), parts)]


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_equals_one_dense_mask_with_gradients(heads, window, scaling):
    parts = inputs(torch.float32, num_heads=heads[0], num_shared=heads[1])
    exact = [part.detach().double().requires_grad_() for part in parts]
    got = with_gradients(grouped_attention, parts, groups=GROUPS, scaling=scaling, window=window)
    expected = with_gradients(reference, exact, scaling=scaling, window=window)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_double_precision_is_kept_throughout():
    parts = inputs(torch.float64)
    got = with_gradients(grouped_attention, parts, groups=GROUPS, scaling=None, window=4)
    torch.testing.assert_close(
        got, with_gradients(reference, parts, window=4), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("max_scores", [room.MAX_SCORES, 1])
def test_products_in_bf16_are_the_exact_gradients_to_rounding(monkeypatch, window, max_scores):
    calls = []
    backward = room._backward
    monkeypatch.setattr(room, "_backward", lambda *parts: calls.append(1) or backward(*parts))
    monkeypatch.setattr(room, "MAX_SCORES", max_scores)
    parts = inputs(torch.bfloat16)
    exact = [part.detach().double().requires_grad_() for part in parts]
    got = with_gradients(grouped_attention, parts, groups=GROUPS, scaling=0.7, window=window)
    expected = with_gradients(reference, exact, scaling=0.7, window=window)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() < 0.01 * other.norm()
        assert (one - other).abs().max() < 0.02 * other.abs().max()
    # Four prompts; then the completions with inputs of three of them, all at once or one by one.
    assert len(calls) == (4 + 3 if max_scores > 1 else 4 + 3 + 2 + 1)


def test_values_in_bf16_are_the_same_with_and_without_gradients():
    parts = inputs(torch.bfloat16)
    options = {"groups": GROUPS, "scaling": None, "window": None}
    with torch.no_grad():
        alone = grouped_attention(*parts, **options)
    assert torch.equal(alone, grouped_attention(*parts, **options))


def test_training_goes_on_after_a_pass_in_inference_mode():
    room._mask.cache_clear()
    parts = inputs(torch.bfloat16)
    options = {"groups": GROUPS, "scaling": None, "window": None}
    with torch.inference_mode():
        grouped_attention(*parts, **options)
    assert all(
        part.isfinite().all() for part in with_gradients(grouped_attention, parts, **options)
    )
