"""KL in both directions: by hand, against torch.distributions, and what is dropped."""

import math

import pytest
import torch

from tropism.measurements.kl_drift import TokenKL, both_kls


def identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def test_by_hand():
    # One position, two tokens: (1/2, 1/2) before and (1/4, 3/4) after, as logits without a head.
    start, tuned = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, math.log(3.0)]])
    forward, reverse = both_kls(start, tuned, starting_head=identity, tuned_head=identity)
    assert forward.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert reverse.item() == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
def test_two_heads_and_any_chunk_size(chunk_tokens):
    generator = torch.Generator().manual_seed(0)
    start, tuned = torch.randn(2, 70, 5, generator=generator)
    before, after = torch.randn(2, 11, 5, generator=generator)
    forward, reverse = both_kls(
        start,
        tuned,
        starting_head=lambda h: h @ before.T,
        tuned_head=lambda h: h @ after.T,
        chunk_tokens=chunk_tokens,
    )
    p = torch.distributions.Categorical(logits=start @ before.T)
    q = torch.distributions.Categorical(logits=tuned @ after.T)
    kl = torch.distributions.kl_divergence
    torch.testing.assert_close(forward, kl(p, q), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reverse, kl(q, p), atol=1e-5, rtol=1e-5)


def test_softmax_of_bf16_logits_is_in_fp32():
    generator = torch.Generator().manual_seed(0)
    start, tuned = torch.randn(2, 9, 300, generator=generator).bfloat16()
    forward, _ = both_kls(start, tuned, starting_head=identity, tuned_head=identity)
    exact, _ = both_kls(start.double(), tuned.double(), starting_head=identity, tuned_head=identity)
    assert forward.dtype == torch.float32
    torch.testing.assert_close(forward, exact.float(), atol=1e-5, rtol=1e-5)


def test_equal_policies_are_exactly_zero_apart():
    hidden = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    for kl in both_kls(hidden, hidden, starting_head=identity, tuned_head=identity):
        assert kl.abs().max() == 0


def test_tokens_without_probability_and_positions_without_a_value():
    inf = math.inf
    start = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    tuned = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]])
    forward, reverse = both_kls(start, tuned, starting_head=identity, tuned_head=identity)
    # A token that neither can write adds nothing; one that only the first can makes KL infinite.
    assert forward[:2].tolist() == [0.0, inf]
    assert reverse[1].item() == pytest.approx(math.log(3 / 2))
    tokens = TokenKL(forward, reverse, torch.tensor([0, 4, 4]))
    values, prompts, num_dropped = tokens.kept("forward")
    assert (values.tolist(), prompts.tolist(), num_dropped) == ([0.0], [0], 2)
    values, prompts, num_dropped = tokens.kept("reverse")
    assert (len(values), prompts.tolist(), num_dropped) == (2, [0, 4], 1)


def test_nothing_to_measure():
    empty = torch.zeros(0, 4)
    for kl in both_kls(empty, empty, starting_head=identity, tuned_head=identity):
        assert kl.shape == (0,)
