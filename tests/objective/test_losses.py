import math

import pytest
import torch

from tropism.objective.kl import kl_k3
from tropism.objective.losses import clipped_surrogate, token_weights

LENGTHS = torch.tensor([2, 6])
ADVANTAGES = torch.tensor([1.0, -1.0])


def on_policy_loss(loss: str) -> float:
    """Two completions of lengths 2 and 6 with advantages +1 and -1, ratio 1 everywhere."""
    mask = torch.arange(6)[None] < LENGTHS[:, None]
    logprobs = torch.zeros(2, 6)
    token_loss = clipped_surrogate(
        logprobs, old_logprobs=logprobs, advantages=ADVANTAGES, clip_low=0.2, clip_high=0.2
    ).loss
    weights = token_weights(LENGTHS, loss=loss, max_completion_length=10)
    return float((token_loss * weights[:, None] * mask).sum())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", 0.0),  # (-1 + 1) / 2
        ("dapo", (-2 + 6) / 8),
        ("dr_grpo", (-2 + 6) / (2 * 10)),
    ],
)
def test_hand_computed_denominators(loss, expected):
    assert on_policy_loss(loss) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_parts_add_up_to_the_whole(loss):
    lengths = torch.randint(1, 9, (8,))
    weights = token_weights(lengths, loss=loss, max_completion_length=16)
    mask = torch.arange(8)[None] < lengths[:, None]
    token_loss = torch.randn(8, 8)
    whole = (token_loss * weights[:, None] * mask).sum()
    parts = [
        (token_loss[rows] * weights[rows, None] * mask[rows]).sum()
        for rows in torch.arange(8).split(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_clip_higher_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 under advantages +1, -1, +1, -1; clip to [0.8, 1.28].
    ratio = torch.tensor([[1.5], [1.5], [0.5], [0.5]])
    result = clipped_surrogate(
        ratio.log(),
        old_logprobs=torch.zeros(4, 1),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert result.loss.flatten().tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert result.clipped_high.flatten().tolist() == [True, False, False, False]
    assert result.clipped_low.flatten().tolist() == [False, False, False, True]


def test_gradient_on_policy_is_the_policy_gradient_and_zero_where_clipped():
    logprobs = torch.tensor([[0.0], [math.log(2.0)]], requires_grad=True)
    old = torch.tensor([[0.0], [0.0]])
    advantages = torch.tensor([0.7, 0.7])
    clipped_surrogate(
        logprobs, old_logprobs=old, advantages=advantages, clip_low=0.2, clip_high=0.2
    ).loss.sum().backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-0.7, 0.0])


def test_k3_is_zero_at_equality_positive_elsewhere_and_unbiased():
    assert kl_k3(torch.zeros(1, 1), reference_logprobs=torch.zeros(1, 1)).item() == 0.0
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.2, 0.2, 0.6])
    estimates = kl_k3(policy.log()[None], reference_logprobs=reference.log()[None])[0]
    assert (estimates >= 0).all()
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * estimates).sum(), exact)
