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
