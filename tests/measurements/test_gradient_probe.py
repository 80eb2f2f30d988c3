"""The probe's gradients against autograd's, on every kind of model that it must not disturb."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from tropism.measurements.gradient_probe import GradientProbe, RowGradients, linear_shape
from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.measurements.sketches import ExactGradients, Sketch, sketch_cost

NUM_ROWS, LENGTH, VOCABULARY = 3, 9, 50
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped-query attention
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


@dataclass
class Case:
    """A model to probe, and a plain fp32 copy whose weights are the effective ones."""

    model: nn.Module
    linears: list[tuple[LinearSite, nn.Module]]
    plain: nn.Module


def llama(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **options}))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def family(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**LLAMA, "pad_token_id": 0, **options})
    return transformers.AutoModelForCausalLM.from_config(config)


def linear_names(base: nn.Module) -> list[str]:
    head = base.get_output_embeddings()
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def with_linears(model: nn.Module, base: nn.Module, names: list[str], plain: nn.Module) -> Case:
    modules = [base.get_submodule(name) for name in names]
    modules = [m.get_base_layer() if isinstance(m, LoraLayer) else m for m in modules]
    return Case(model, list(zip(name_sites(names), modules, strict=True)), plain)


def full_parameter(base: nn.Module) -> Case:
    return with_linears(base, base, linear_names(base), copy.deepcopy(base))


def frozen(base: nn.Module) -> Case:
    case = full_parameter(base)
    base.requires_grad_(False)
    return case


def adapted(base: nn.Module, some: Callable[[str], bool] = lambda name: True) -> Case:
    """LoRA with B != 0 on some linears; the copy has W + s B A instead."""
    plain, names = copy.deepcopy(base), linear_names(base)
    is_transposed = isinstance(base.get_submodule(names[0]), Conv1D)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[n for n in names if some(n)],
        fan_in_fan_out=is_transposed,
    )
    model = get_peft_model(base, config)
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            nn.init.normal_(b, std=0.1)
            update = module.scaling["default"] * b @ a
            with torch.no_grad():
                plain.get_submodule(name).weight += update.mT if is_transposed else update
    return with_linears(model, base, names, plain)


def checkpointed(case: Case, base: nn.Module) -> Case:
    base.gradient_checkpointing_enable({"use_reentrant": False})
    case.model.train()
    return case


def make_case(name: str) -> Case:
    if name == "gemma3":  # scales its embeddings, has a norm around each block
        return frozen(family("Gemma3Text", head_dim=8, sliding_window=4))
    if name == "lfm2":  # short convolutions beside attention
        return adapted(family("Lfm2", layer_types=["conv", "full_attention", "conv"]))
    if name == "phi3":  # fused projections
        return adapted(family("Phi3"))
    base = gpt2() if name.startswith("gpt2") else llama()
    if name.endswith("checkpointed_lora"):
        return checkpointed(adapted(base), base)
    if name.endswith("checkpointed"):
        return checkpointed(full_parameter(base), base)
    if name.endswith("top_lora"):  # all below has neither adapter nor gradient
        return adapted(base, lambda n: ".2." in n and "down" in n)
    if name.endswith("lora"):
        return adapted(base)
    if name.endswith("frozen"):
        return frozen(base)
    return full_parameter(base)


CASES = [
    "llama",
    "llama_frozen",
    "llama_lora",
    "llama_top_lora",
    "llama_checkpointed",
    "llama_checkpointed_lora",
    "gpt2",
    "gpt2_lora",
    "gemma3",
    "lfm2",
    "phi3",
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.fixture
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (NUM_ROWS, LENGTH), generator=generator)


def row_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """[m] -(token weight) * log-probability of each row's last tokens: fewer for later rows."""
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    lengths = torch.tensor([6, 4, 3])[: len(tokens), None]
    mask = torch.arange(2, LENGTH + 1) <= 2 + lengths
    weights = torch.tensor([0.5, 1.0, 2.0])[: len(tokens)]
    return -weights * (logprobs * mask).sum(dim=1)


def probe(case: Case, tokens: Tensor, measure: ExactGradients | Sketch, **options) -> RowGradients:
    embedding = case.model.get_input_embeddings()
    with GradientProbe(case.linears, embedding, measure) as inside:
        return inside.backward(row_losses(case.model, tokens).sum(), **options)


def reference(case: Case, tokens: Tensor) -> list[Tensor]:
    """One [m, d_out, d_in] per linear: a backward for each row through the effective weights."""
    case.plain.eval()
    weights = [case.plain.get_submodule(site.name).weight for site, _ in case.linears]
    by_row = []
    for row in range(NUM_ROWS):
        loss = row_losses(case.plain, tokens)[row]
        by_row.append(torch.autograd.grad(loss, weights))
    return [
        torch.stack([row[i].mT if is_conv(case, i) else row[i] for row in by_row])
        for i in range(len(weights))
    ]


def is_conv(case: Case, index: int) -> bool:
    return isinstance(case.linears[index][1], Conv1D)


def test_exact_gradients_are_autograds(case: Case, tokens: Tensor) -> None:
    found = probe(case, tokens, ExactGradients()).rows
    for (site, linear), rows, expected in zip(
        case.linears, found, reference(case, tokens), strict=True
    ):
        assert expected.shape[1:] == linear_shape(linear)
        error = (rows - expected.flatten(1)).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert error.max() < 1e-5, site.key


def test_sketch_is_the_projected_gradient(case: Case, tokens: Tensor) -> None:
    sketch = Sketch(8, seed=3)
    weights = torch.tensor([1.0, -2.0, 0.5])
    found = probe(case, tokens, sketch, row_weights=weights)
    for i, expected in enumerate(reference(case, tokens)):
        key, (d_out, d_in) = case.linears[i][0].key, expected.shape[1:]
        psi = sketch._matrix(key, "output", torch.empty(1, d_out)) / 8**0.5
        omega = sketch._matrix(key, "input", torch.empty(1, d_in)) / 8**0.5
        rows = psi.mT @ expected @ omega
        assert torch.allclose(found.rows[i], rows.flatten(1), rtol=1e-3, atol=1e-5 * rows.norm())
        summed = psi.mT @ torch.einsum("m,moi->oi", weights, expected)
        assert torch.allclose(found.summed[i], summed, rtol=1e-3, atol=1e-5 * summed.norm())


def test_no_parameter_is_touched(case: Case, tokens: Tensor) -> None:
    row_losses(case.model, tokens).sum().requires_grad_().backward()
    before = {
        name: (p.requires_grad, p.grad if p.grad is None else p.grad.clone())
        for name, p in case.model.named_parameters()
    }
    objects = {name: p.grad for name, p in case.model.named_parameters()}
    probe(case, tokens, Sketch(4))
    for name, p in case.model.named_parameters():
        requires_grad, grad = before[name]
        assert p.requires_grad == requires_grad
        assert p.grad is objects[name]
        assert grad is None or torch.equal(p.grad, grad)


def test_logits_and_later_training_do_not_change(case: Case, tokens: Tensor) -> None:
    def train() -> tuple[Tensor, list[Tensor]]:
        case.model.zero_grad(set_to_none=True)
        losses = row_losses(case.model, tokens)
        if losses.requires_grad:
            losses.sum().backward()
        return losses.detach(), [p.grad for p in case.model.parameters() if p.grad is not None]

    losses, gradients = train()
    hooks = [len(module._forward_hooks) for module in case.model.modules()]
    with GradientProbe(case.linears, case.model.get_input_embeddings(), Sketch(4)):
        assert torch.equal(row_losses(case.model, tokens), losses)
        with torch.no_grad():
            assert torch.equal(row_losses(case.model, tokens), losses)
    losses_after, gradients_after = train()
    assert torch.equal(losses, losses_after)
    assert all(map(torch.equal, gradients, gradients_after))
    assert [len(module._forward_hooks) for module in case.model.modules()] == hooks


def test_no_parameter_gradient_is_computed(tokens: Tensor) -> None:
    # Trained or frozen, the backward multiplies the same matrices.
    def flops(case: Case) -> int:
        with FlopCounterMode(display=False) as counter:
            probe(case, tokens, Sketch(4))
        return counter.get_total_flops()

    assert flops(make_case("llama")) == flops(make_case("llama_frozen"))


def test_cost_is_the_counted_one(tokens: Tensor) -> None:
    def flops(linears: list[tuple[LinearSite, nn.Module]], **options) -> int:
        with FlopCounterMode(display=False) as counter:
            probe(Case(case.model, linears, case.plain), tokens, Sketch(8), **options)
        return counter.get_total_flops()

    case = make_case("llama_frozen")
    shapes = [linear_shape(linear) for _, linear in case.linears]
    whole = 4 * NUM_ROWS * (LENGTH - 1) * sum(d_out * d_in for d_out, d_in in shapes)
    extra = flops(case.linears) - flops([])
    assert extra == sketch_cost(shapes, 8) * whole
    weighted = flops(case.linears, row_weights=torch.ones(NUM_ROWS)) - flops([])
    assert weighted == pytest.approx(sketch_cost(shapes, 8, is_summed=True) * whole)


def test_cost_of_real_models() -> None:
    smollm2 = [
        (576, 576),
        (192, 576),
        (192, 576),
        (576, 576),
        (1536, 576),
        (1536, 576),
        (576, 1536),
    ]
    hidden, keys, wide = 4096, 1024, 14336
    llama_8b = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    llama_8b += [(wide, hidden), (wide, hidden), (hidden, wide)]
    assert sketch_cost(smollm2, 32) == pytest.approx(0.047, abs=0.001)
    assert sketch_cost(llama_8b, 32) == pytest.approx(0.0060, abs=0.0001)


def test_activations_are_recomputed_not_kept(tokens: Tensor) -> None:
    # Under gradient checkpointing the inputs of a layer's linears live only while it is recomputed.
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    def elements_kept(name: str, *, is_probed: bool) -> int:
        case = make_case(name)
        kept.clear()
        linears = case.linears if is_probed else []
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            GradientProbe(linears, case.model.get_input_embeddings(), Sketch(4)),
        ):
            row_losses(case.model, tokens)
        return sum(kept)

    name = "llama_checkpointed_lora"
    assert elements_kept(name, is_probed=True) == elements_kept(name, is_probed=False)


class Toy(nn.Module):
    """One linear used twice, one that the loss does not reach, one on flattened tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.twice, self.unused = nn.Linear(6, 6), nn.Linear(6, 3)
        self.flat, self.routed = nn.Linear(6, 4), nn.Linear(6, 4)
        self.should_route = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.twice(torch.tanh(self.twice(x)))
        self.unused(x)
        if self.should_route:
            return self.routed(x.flatten(0, 1)[:5])
        return self.flat(x.flatten(0, 1)).view(*tokens.shape, -1)


def toy_linears(toy: Toy) -> list[tuple[LinearSite, nn.Module]]:
    names = ["twice", "unused", "flat", "routed"]
    return [(LinearSite(n, None, n), toy.get_submodule(n)) for n in names]


def test_twice_unused_and_flattened(tokens: Tensor) -> None:
    toy = Toy()
    with GradientProbe(toy_linears(toy), toy.embed, ExactGradients()) as inside:
        found = inside.backward(toy(tokens).square().sum()).rows
    for row in range(NUM_ROWS):
        twice, flat = torch.autograd.grad(
            toy(tokens)[row].square().sum(), [toy.twice.weight, toy.flat.weight]
        )
        assert torch.allclose(found[0][row], twice.flatten(), rtol=1e-4, atol=1e-6)
        assert torch.allclose(found[2][row], flat.flatten(), rtol=1e-4, atol=1e-6)
    assert found[1].shape == (NUM_ROWS, 18)
    assert not found[1].any()
    assert not found[3].any()


def test_several_backwards_in_one_probe(tokens: Tensor) -> None:
    case = make_case("llama_lora")
    sketch = Sketch(4)
    expected = probe(case, tokens, sketch)
    with GradientProbe(case.linears, case.model.get_input_embeddings(), sketch) as inside:
        for _ in range(2):
            found = inside.backward(row_losses(case.model, tokens).sum())
            assert all(map(torch.equal, found.rows, expected.rows))


def test_bfloat16_is_close(tokens: Tensor) -> None:
    case = make_case("llama_frozen")
    exact = probe(case, tokens, Sketch(16)).rows
    case.model.to(torch.bfloat16)
    rounded = probe(case, tokens, Sketch(16)).rows
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.995


def test_refusals(tokens: Tensor) -> None:
    toy = Toy()
    with GradientProbe(toy_linears(toy), toy.embed, Sketch(4)) as inside:
        with pytest.raises(ValueError, match="no forward"):
            inside.backward(torch.zeros((), requires_grad=True))
        loss = toy(tokens).sum()
        inside.backward(loss)
        with pytest.raises(ValueError, match="once before each call"):
            inside.backward(loss)
        toy(tokens)
        with pytest.raises(ValueError, match="ran a second time"):
            toy(tokens)
    toy.should_route = True
    with (
        GradientProbe(toy_linears(toy), toy.embed, Sketch(4)) as inside,
        pytest.raises(ValueError, match=r"'routed' sees .* one leading row"),
    ):
        inside.backward(toy(tokens).sum())
    assert not toy.embed._forward_hooks
