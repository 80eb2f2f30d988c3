import pytest
import torch

from tropism.objective.kl import full_kl, kl_estimate

POLICY = torch.tensor([0.5, 0.3, 0.2])
REFERENCE = torch.tensor([0.2, 0.2, 0.6])


def estimates(estimator: str) -> torch.Tensor:
    return kl_estimate(
        POLICY.log()[None], reference_logprobs=REFERENCE.log()[None], estimator=estimator
    )[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_zero_at_equality(estimator):
    zeros = torch.zeros(1, 1)
    assert kl_estimate(zeros, reference_logprobs=zeros, estimator=estimator).item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_under_the_policy(estimator):
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    torch.testing.assert_close((POLICY * estimates(estimator)).sum(), exact)


def test_by_hand_and_by_sign():
    log_ratio = (POLICY / REFERENCE).log()
    torch.testing.assert_close(estimates("k1"), log_ratio)
    torch.testing.assert_close(estimates("k2"), log_ratio.square() / 2)
    assert (estimates("k3") >= 0).all()
    assert (estimates("k1") < 0).any()


def test_gradient_of_k2_is_that_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    logprobs = logits.log_softmax(0)
    probabilities = logprobs.exp()
    exact = (probabilities * (logprobs - REFERENCE.log())).sum()
    sampled = kl_estimate(logprobs[None], reference_logprobs=REFERENCE.log()[None], estimator="k2")[
        0
    ]
    expected = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    found = torch.autograd.grad((probabilities.detach() * sampled).sum(), logits)[0]
    torch.testing.assert_close(found, expected)


def test_full_kl_is_that_of_the_two_distributions():
    generator = torch.Generator().manual_seed(0)
    hidden, other = torch.randn(2, 70, 5, generator=generator)
    weight = torch.randn(11, 5, generator=generator)
    found = full_kl(hidden, other, head=lambda h: h @ weight.T, temperature=0.7)
    p = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    q = torch.distributions.Categorical(logits=other @ weight.T / 0.7)
    torch.testing.assert_close(found, torch.distributions.kl_divergence(p, q))
    assert full_kl(hidden, hidden, head=lambda h: h @ weight.T, temperature=1.0).max() == 0
