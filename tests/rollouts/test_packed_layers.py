"""Packed layers against the model's own modules, and the shared prompt against plain attention."""

from __future__ import annotations

import pytest
import torch

from tropism.forward.packed_linear import can_pack
from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.decoder import Decoder
from tropism.rollouts.packed_layers import PackedLayers
from tropism.rollouts.shared_prompt_cache import SharedPromptCache

PROMPTS = [(5, 6, 7, 8, 9), (10, 11)]


def test_prompt_and_own_tokens_are_one_attention():
    """Two groups of three rows, one prompt with pads, a row that leaves; fp32, plain softmax."""
    torch.manual_seed(0)
    num_heads, num_key_heads, width, scaling = 4, 2, 8, 0.3
    prompts = (torch.randn(2, num_key_heads, 5, width), torch.randn(2, num_key_heads, 5, width))
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    cache = SharedPromptCache([prompts], mask=mask, group_size=3, limit=4)
    rows, own = list(range(6)), {row: [] for row in range(6)}
    for step in range(4):
        if step == 2:
            rows = [0, 2, 3, 5]
            cache.keep(torch.tensor(rows))
        query = torch.randn(len(rows), num_heads, width)
        key, value = torch.randn(2, len(rows), num_key_heads, width)
        found = cache.attend(0, query, key, value, scaling=scaling)
        cache.advance()
        for i, row in enumerate(rows):
            own[row].append((key[i], value[i]))
            seen = mask[row // 3]
            keys = torch.cat(
                [prompts[0][row // 3][:, seen], torch.stack([k for k, _ in own[row]], 1)], 1
            )
            values = torch.cat(
                [prompts[1][row // 3][:, seen], torch.stack([v for _, v in own[row]], 1)], 1
            )
            keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)
            weights = (scaling * torch.einsum("hd,hsd->hs", query[i], keys)).softmax(-1)
            expected = torch.einsum("hs,hsd->hd", weights, values).flatten()
            torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    loaded = load_policy(Model(name="organism"), LoRA(rank=4, alpha=8))
    with torch.no_grad():
        for site in loaded.sites:
            loaded.adapter(site).b.normal_(std=0.1)
    if not can_pack(loaded.weight(loaded.sites[0])):
        pytest.skip("no bf16 products in oneDNN on this processor")
    loaded.model.eval()
    return loaded


def logits_of(policy, *, is_packed: bool, prompts=PROMPTS) -> list[torch.Tensor]:
    """Of six steps with given tokens; two of the six rows leave after the third."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), policy.merged(num_rows=6):
        packed = PackedLayers(policy, num_positions=20) if is_packed else None
        decoder = Decoder(policy, prompts, group_size=3, limit=8, packed=packed)
        found, num_rows = [decoder.logits], 6
        for step in range(6):
            if step == 3:
                decoder.keep(torch.tensor([0, 1, 3, 5]))
                num_rows = 4
            tokens = torch.randint(5, 90, (num_rows,), generator=generator)
            found.append(decoder.step(tokens))
    return found


@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0]] * 2], ids=["pads", "no pads"])
def test_steps_are_those_of_the_modules_but_for_rounding(policy, prompts):
    assert PackedLayers.fit(policy)
    packed = logits_of(policy, is_packed=True, prompts=prompts)
    modules = logits_of(policy, is_packed=False, prompts=prompts)
    assert torch.equal(packed[0], modules[0])
    for one, other in zip(packed, modules, strict=True):
        error = (one - other).float().norm() / other.float().norm()
        assert error < 0.02


def test_other_layers_and_dtypes_go_through_their_modules(policy):
    exact = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    assert not PackedLayers.fit(exact)
    type(policy.base.get_decoder().layers[0]).__name__ = "UnknownLayer"
    try:
        assert not PackedLayers.fit(policy)
    finally:
        type(policy.base.get_decoder().layers[0]).__name__ = "LlamaDecoderLayer"
