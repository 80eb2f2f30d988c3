"""Packed weights give the bits of plain ones, and everything that was there comes back."""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tropism.forward.packed_linear import PackedLinear, can_pack
from tropism.lora.views import View
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy

needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)), reason="oneDNN has no bf16 here"
)
LORAS = {"everywhere": {}, "in places": {"modules": ("q_proj", "down_proj"), "layers": (1, 5)}}


def test_only_bf16_is_packed():
    assert not can_pack(torch.zeros(2, 2))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float16))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16, device="meta"))


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("d_in", "d_out"), [(64, 192), (192, 64), (37, 101)])
@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_bits_of_the_plain_product(bias, d_in, d_out, num_rows):
    torch.manual_seed(0)
    plain = nn.Linear(d_in, d_out, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    forward = PackedLinear(plain.weight, plain.bias, num_rows=num_rows)
    for shape in [(num_rows,), (num_rows, 1), (1,), (3,), (2, 9)]:
        x = torch.randn(*shape, d_in, dtype=torch.bfloat16)
        assert torch.equal(forward(x), linear(x, plain.weight, plain.bias))


@needs_packing
def test_a_packed_copy_needs_nothing_of_the_weight():
    torch.manual_seed(0)
    weight, x = torch.randn(16, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    expected, forward = linear(x, weight), PackedLinear(weight, None, num_rows=4)
    weight.zero_()
    assert torch.equal(forward(x), expected)


@needs_packing
def test_a_view_packs_other_weights_and_gives_its_own_back():
    torch.manual_seed(0)
    own = nn.Linear(8, 16, dtype=torch.bfloat16).requires_grad_(False)
    other, x = torch.randn(16, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    before = own(x)
    with View() as view:
        view.pack(own, num_rows=4)
        assert torch.equal(own(x), before)
    with View() as view:
        view.pack(own, num_rows=4, weight=other)
        assert torch.equal(own(x), linear(x, other, own.bias))
    assert torch.equal(own(x), before)
    assert "forward" not in vars(own)


def load(lora: str, dtype: str = "bfloat16") -> Policy:
    torch.manual_seed(0)
    options = {"rank": 4, "alpha": 8, **LORAS[lora]}
    policy = load_policy(Model(name="organism", dtype=dtype), LoRA(**options))
    with torch.no_grad():
        for site in policy.sites:
            if (adapter := policy.adapter(site)) is not None:
                adapter.b.normal_(std=0.05)
    return policy


def logits(policy, num_rows=8):
    ids = torch.randint(4, 100, (num_rows, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return policy.model(input_ids=ids, use_cache=False).logits


def situation(policy):
    """All that a view may touch: what modules compute, which adapters are off, each weight."""
    digest = hashlib.sha256()
    for parameter in policy.model.parameters():
        digest.update(parameter.detach().flatten().view(torch.uint8).numpy().tobytes())
    computes = {name: vars(m).get("forward") for name, m in policy.model.named_modules()}
    off = [name for name, m in policy.model.named_modules() if vars(m).get("_disable_adapters")]
    places = [parameter.data_ptr() for parameter in policy.model.parameters()]
    return digest.hexdigest(), computes, off, places


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_merged_for_so_many_rows_is_merged(lora, dtype, num_rows):
    policy = load(lora, dtype)
    before, unmerged = situation(policy), logits(policy)
    with policy.merged():
        expected = [logits(policy, 8), logits(policy, 3)]
    with policy.merged(num_rows=num_rows):
        found = [logits(policy, 8), logits(policy, 3)]
        linears = [policy.linear(site) for site in policy.sites]
        linears.append(policy.base.get_output_embeddings())
        assert all(("forward" in vars(one)) == can_pack(one.weight) for one in linears)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert situation(policy) == before
    assert torch.equal(logits(policy), unmerged)
    assert not torch.equal(found[0], unmerged)


def test_everything_is_back_after_an_exception():
    policy = load("everywhere")
    before, unmerged = situation(policy), logits(policy)
    with pytest.raises(RuntimeError, match="sampler"), policy.merged(num_rows=8):
        raise RuntimeError("sampler")
    assert situation(policy) == before
    assert torch.equal(logits(policy), unmerged)


def test_everything_is_back_after_an_exception_halfway(monkeypatch):
    policy = load("everywhere")
    before, unmerged, adapter = situation(policy), logits(policy), policy.adapter

    def fails(site):
        if site.layer == 6:  # the layers below are merged then
            raise RuntimeError("layer 6")
        return adapter(site)

    monkeypatch.setattr(policy, "adapter", fails)
    with pytest.raises(RuntimeError, match="layer 6"), policy.merged(num_rows=8):
        pytest.fail("there is no way in")
    assert situation(policy) == before
    assert torch.equal(logits(policy), unmerged)
