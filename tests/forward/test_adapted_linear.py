"""The one-function LoRA linear against PEFT's own layer, on the same weights."""

from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tropism.forward.adapted_linear import AdaptedLinear

D_IN, D_OUT, RANK, NUM = 24, 40, 4, 15  # NUM: 3 x 5 positions


def adapted(dtype=torch.float32, *, bias=True, alpha=8, **options):
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=alpha, target_modules=["linear"], **options)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    model = nn.ModuleDict({"linear": nn.Linear(D_IN, D_OUT, bias=bias, dtype=dtype)})
    layer = get_peft_model(model, config).get_base_model()["linear"]
    assert type(layer) is AdaptedLinear
    layer.lora_A.float()
    layer.lora_B.float()
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer


def factors(layer):
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def states(dtype=torch.float32, *, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, D_IN, generator=generator).to(dtype)
    return x.requires_grad_(requires_grad)


def results(forward, layer, x):
    """Output, and the gradients for the input and both factors; None where there is none."""
    layer.zero_grad()
    x.grad = None
    output = forward(x)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weights.to(output.dtype)).sum().backward()
    return [output.detach(), x.grad, *(factor.grad for factor in factors(layer))]


def is_own_way(output):
    return type(output.grad_fn).__name__ == "_AdaptedProductBackward"


def by_peft(layer):
    return lambda x: Linear.forward(layer, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [4, 8, 2])
def test_equals_peft_in_fp32(bias, alpha):
    layer, x = adapted(bias=bias, alpha=alpha), states()
    assert layer.scaling["default"] == alpha / RANK
    assert is_own_way(layer(x))
    own, peft = results(layer, layer, x), results(by_peft(layer), layer, x)
    for one, other in zip(own, peft, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
def test_bf16_is_the_truth_to_rounding(bias):
    layer, x = adapted(torch.bfloat16, bias=bias), states(torch.bfloat16)
    assert is_own_way(layer(x))
    own, peft = results(layer, layer, x), results(by_peft(layer), layer, x)
    exact = deepcopy(layer).double()
    truth = results(by_peft(exact), exact, x.detach().double().requires_grad_())
    for name, one, other, true in zip("oxab", own, peft, truth, strict=True):
        assert one.dtype == other.dtype, name
        assert one.dtype == (torch.float32 if name in "ab" else torch.bfloat16), name
        error = (one.double() - true).norm() / true.norm()
        assert error < 2**-7, name  # two roundings to 8 bits
        assert error < 4 * (other.double() - true).norm() / true.norm() + 2**-8, name


def test_shapes_of_any_number_of_dimensions():
    layer, x = adapted(), states()
    whole = layer(x)
    torch.testing.assert_close(layer(x[1]), whole[1])
    torch.testing.assert_close(layer(x[1, 2]), whole[1, 2])
    nothing = x.detach()[:, :0].requires_grad_()
    output, for_x, *others = results(layer, layer, nothing)
    assert output.shape == (3, 0, D_OUT)
    assert for_x.shape == nothing.shape
    assert all((gradient == 0).all() for gradient in others)


def test_what_is_not_in_need_of_a_gradient_gets_none():
    layer, x = adapted(), states()
    whole = results(layer, layer, x)
    a, b = factors(layer)

    b.requires_grad_(False)
    _, for_x, for_a, for_b = results(layer, layer, x)
    assert for_b is None
    torch.testing.assert_close((for_x, for_a), (whole[1], whole[2]), rtol=0, atol=0)

    a.requires_grad_(False)  # KEEP: applied, not trained
    assert is_own_way(layer(x))
    output, for_x, for_a, for_b = results(layer, layer, x)
    assert for_a is None
    assert for_b is None
    torch.testing.assert_close((output, for_x), (whole[0], whole[1]), rtol=0, atol=0)
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize("needs_x", [True, False])
def test_the_base_product_is_only_undone_for_an_input_with_gradient(needs_x):
    layer, x = adapted(), states(requires_grad=needs_x)
    output = layer(x)
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    for_factors = 2 * NUM * RANK * (D_OUT + D_IN + D_OUT)
    for_x = 2 * NUM * D_IN * D_OUT  # the counter does not know what is added in place
    assert counter.get_total_flops() == for_factors + (for_x if needs_x else 0)
    assert (x.grad is not None) == needs_x


def test_inputs_and_the_incoming_gradient_stay_as_they_are():
    layer, x = adapted(), states()
    output = layer(x)
    weights = torch.randn_like(output)
    before = [t.detach().clone() for t in (x, weights, *layer.parameters())]
    output.backward(weights)
    after = [t.detach() for t in (x, weights, *layer.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# -- PEFT's own way, where more is asked ----------------------------------------------------------


def equals_peft_exactly(layer, x):
    own, peft = results(layer, layer, x), results(by_peft(layer), layer, x)
    torch.testing.assert_close(own, peft, rtol=0, atol=0)
    return not is_own_way(layer(x))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_probes_on_the_base_see_what_goes_into_it(kind):
    layer, x, seen = adapted(), states(), []
    handle = getattr(layer.base_layer, kind)(lambda module, given, *_: seen.append(given[0]))
    assert equals_peft_exactly(layer, x)
    assert torch.equal(seen[0], x)
    handle.remove()
    assert is_own_way(layer(x))


def test_dropout_acts_in_training_only():
    layer, x = adapted(lora_dropout=0.5), states()
    torch.manual_seed(3)
    own = layer(x)
    torch.manual_seed(3)
    assert torch.equal(own, Linear.forward(layer, x))
    assert not is_own_way(own)
    layer.eval()
    assert is_own_way(layer(x))


def test_adapters_that_are_off_are_off():
    layer, x = adapted(), states()
    layer._disable_adapters = True
    assert torch.equal(layer(x), layer.base_layer(x))
    layer._disable_adapters = False
    layer.set_adapter([])
    assert torch.equal(layer(x), layer.base_layer(x))


def test_merged_adapters_are_not_added_twice():
    layer, x = adapted(), states()
    unmerged = layer(x)
    layer.merge()
    torch.testing.assert_close(layer(x), unmerged)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_other_dtypes_and_autocast_are_left_to_peft():
    layer, x = adapted(), states()
    with torch.autocast("cpu", torch.bfloat16):
        assert equals_peft_exactly(layer, x)
    assert is_own_way(layer(x))
    layer.base_layer.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert equals_peft_exactly(layer, x)


def test_two_adapters_at_once_and_dora_are_left_to_peft():
    layer, x = adapted(), states()
    layer.update_layer("other", RANK, lora_alpha=4, config=LoraConfig(init_lora_weights=False))
    assert is_own_way(layer(x))  # one of two is active
    layer.set_adapter(["default", "other"])
    assert equals_peft_exactly(layer, x)
    assert equals_peft_exactly(adapted(use_dora=True), x)
