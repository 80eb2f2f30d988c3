import pytest
import torch
from torch import nn

from tropism.objective.logprobs import selected_logprobs


@pytest.fixture
def case():
    torch.manual_seed(0)
    head = nn.Linear(8, 33)
    return torch.randn(11, 8, requires_grad=True), torch.randint(0, 33, (11,)), head


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_equals_torch_with_gradients_for_any_chunk(case, temperature, chunk_tokens):
    hidden, targets, head = case
    logprobs, entropy = selected_logprobs(
        hidden, targets, head=head, temperature=temperature, chunk_tokens=chunk_tokens
    )
    distribution = torch.distributions.Categorical(logits=head(hidden) / temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())
    weights = torch.randn(11)
    got = torch.autograd.grad((logprobs * weights).sum(), [hidden, head.weight])
    want = torch.autograd.grad(
        (distribution.log_prob(targets) * weights).sum(), [hidden, head.weight]
    )
    torch.testing.assert_close(got, want)


def test_softmax_is_fp32_under_bf16_weights(case):
    hidden, targets, head = case
    head = head.to(torch.bfloat16)
    low = hidden.detach().to(torch.bfloat16)
    logprobs, _ = selected_logprobs(low, targets, head=head, temperature=1.0)
    assert logprobs.dtype == torch.float32
    exact = head(low).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-6)


def test_nothing_selected(case):
    hidden, targets, head = case
    logprobs, entropy = selected_logprobs(hidden[:0], targets[:0], head=head, temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)


# -- a frozen head --------------------------------------------------------------------------------


def capped(head):
    """As Gemma 2 caps its logits."""
    return lambda hidden: 3 * torch.tanh(head(hidden) / 3)


@pytest.mark.parametrize("wrap", [lambda head: head, capped])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100, None])
def test_under_a_frozen_head_gradients_are_autograds(case, wrap, temperature, chunk_tokens):
    hidden, targets, head = case
    logprobs, entropy = selected_logprobs(
        hidden,
        targets,
        head=wrap(head),
        temperature=temperature,
        is_head_frozen=True,
        chunk_tokens=chunk_tokens,
    )
    distribution = torch.distributions.Categorical(logits=wrap(head)(hidden) / temperature)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    weights = torch.randn(11)
    (expected,) = torch.autograd.grad((distribution.log_prob(targets) * weights).sum(), hidden)
    before = hidden.detach().clone()
    for _ in range(2):  # what was kept is only read
        hidden.grad = None
        (logprobs * weights).sum().backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad, expected)
    assert head.weight.grad is None
    assert torch.equal(hidden, before)


def test_entropies_that_train_take_the_other_way(case):
    hidden, targets, head = case
    _, entropy = selected_logprobs(
        hidden,
        targets,
        head=head,
        temperature=0.6,
        is_head_frozen=True,
        chunk_tokens=4,
        should_train_entropy=True,
    )
    (got,) = torch.autograd.grad(entropy.sum(), hidden)
    exact = torch.distributions.Categorical(logits=head(hidden) / 0.6).entropy()
    (expected,) = torch.autograd.grad(exact.sum(), hidden)
    torch.testing.assert_close(got, expected)


def test_a_frozen_head_without_gradients(case):
    hidden, targets, head = case
    options = {"head": head, "temperature": 0.6, "is_head_frozen": True}
    expected = selected_logprobs(hidden, targets, **options)
    with torch.no_grad():
        alone = selected_logprobs(hidden, targets, **options)
    constant = selected_logprobs(hidden.detach(), targets, **options)
    for found in (alone, constant):
        torch.testing.assert_close(found, tuple(part.detach() for part in expected))
    assert not alone[0].requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_of_bf16_states_are_exact_to_rounding(case, temperature):
    hidden, targets, head = case
    low, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    weights = torch.randn(11)
    options = {"temperature": temperature, "chunk_tokens": 4, "is_head_frozen": True}
    logprobs, _ = selected_logprobs(low, targets, head=head, **options)
    (got,) = torch.autograd.grad((logprobs * weights).sum(), low)
    assert logprobs.dtype == torch.float32
    assert got.dtype == torch.bfloat16
    wide, exact = low.detach().double().requires_grad_(), head.double()
    true = (exact(wide) / temperature).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    (expected,) = torch.autograd.grad((true * weights).sum(), wide)
    assert (got - expected).norm() < 0.01 * expected.norm()
