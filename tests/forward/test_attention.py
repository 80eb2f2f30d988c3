"""What ``attend`` answers, against transformers' own attention."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tropism.forward.attention import attend
from tropism.forward.grouped_attention import grouped_attention
from tropism.types import Group

# Rows, query heads, heads of keys, cached tokens, width of a head.
SHAPES = [(3, 6, 2, 37, 16), (2, 4, 4, 9, 8), (4, 9, 3, 200, 64), (2, 8, 1, 33, 32)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def case(shape, dtype=torch.float32, *, length=1):
    num_rows, num_heads, num_shared, num_cached, width = shape
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = num_heads // num_shared
    query = torch.randn(num_rows, num_heads, length, width, dtype=dtype)
    key, value = torch.randn(2, num_rows, num_shared, num_cached, width, dtype=dtype)
    mask = torch.ones(num_rows, 1, length, num_cached, dtype=torch.bool)
    for row in range(num_rows):
        mask[row, ..., : 2 * row] = False  # padded on the left
    return module, query, key, value, mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_token_is_what_transformers_gives(shape, dtype, is_padded, scaling):
    module, query, key, value, mask = case(shape, dtype)
    mask = mask if is_padded else None
    got, weights = attend(module, query, key, value, mask, scaling=scaling)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    assert weights is None
    assert got.shape == expected.shape
    assert got.is_contiguous()
    if shape[1] == shape[2]:  # nothing to fold
        assert torch.equal(got, expected)
    # Products of several rows add up in another order than those of one: the last bit may differ.
    bound = ROUNDING[dtype] * value.abs().max()
    assert (got.float() - expected.float()).abs().max() <= bound


def test_padded_tokens_are_not_seen():
    module, query, key, value, mask = case(SHAPES[0])
    changed = value.masked_fill(~mask.transpose(2, 3), 1e4)
    before, _ = attend(module, query, key, value, mask)
    after, _ = attend(module, query, key, changed, mask)
    assert torch.equal(before, after)
    assert not torch.equal(attend(module, query, key, changed, None)[0], after)


@pytest.mark.parametrize("length", [1, 5])
def test_whatever_needs_gradients_or_has_several_tokens_is_transformers_own(length):
    results = []
    for attention in (attend, sdpa_attention_forward):
        module, *parts, mask = case((2, 6, 2, 5, 8), length=length)
        for part in parts:
            part.requires_grad_()
        output, _ = attention(module, *parts, mask, scaling=0.3)
        output.square().sum().backward()
        results.append([output.detach(), *(part.grad for part in parts)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    module, *parts, mask = case((2, 6, 2, 5, 8), length=length)
    if length > 1:
        expected, _ = sdpa_attention_forward(module, *parts, mask)
        assert torch.equal(attend(module, *parts, mask)[0], expected)


def test_the_layout_of_a_pack_replaces_the_mask():
    module, query, key, value, _ = case((1, 6, 2, 9, 8), length=9)
    groups = (Group(0, 3, (2, 1)), Group(6, 2, (1,)))
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    got, _ = attend(module, query, key, value, nothing, groups=groups, sliding_window=3)
    expected = grouped_attention(
        *(part[0].transpose(0, 1) for part in (query, key, value)),
        groups=groups,
        scaling=None,
        window=3,
    )
    assert torch.equal(got, expected[None])
