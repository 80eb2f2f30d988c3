import math

import pytest
import torch

from tropism.objective.losses import policy_loss, token_weights

LENGTHS = torch.tensor([2, 6])
ADVANTAGES = torch.tensor([1.0, -1.0])


def surrogate(logprobs, *, old, advantages, **options):
    settings = {"loss": "grpo", "clip_low": 0.2, "clip_high": 0.2} | options
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    return policy_loss(logprobs, old_logprobs=old, advantages=advantages, mask=mask, **settings)


def weights_of(lengths, loss, *, group_size=2, counted=None):
    return token_weights(
        torch.as_tensor(lengths),
        loss=loss,
        group_size=group_size,
        max_completion_length=10,
        counted=counted,
    )


def on_policy_loss(loss: str) -> float:
    """Two completions of lengths 2 and 6 with advantages +1 and -1, ratio 1 everywhere."""
    mask = torch.arange(6)[None] < LENGTHS[:, None]
    logprobs = torch.zeros(2, 6)
    token_loss = surrogate(logprobs, old=logprobs, advantages=ADVANTAGES, loss=loss).loss
    return float((token_loss * weights_of(LENGTHS, loss)[:, None] * mask).sum())


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", 0.0),  # (-1 + 1) / 2
        ("dapo", (-2 + 6) / 8),
        ("dr_grpo", (-2 + 6) / (2 * 10)),
        ("bnpo", (-2 + 6) / 8),
        ("gspo", 0.0),
        ("cispo", 0.0),  # log-probabilities are 0 here; its gradient is dapo's
        ("sapo", (-2 + 2 / 1.05) / 2),  # the gate is 4 / tau * sigmoid(0) at ratio 1
    ],
)
def test_hand_computed_denominators(loss, expected):
    assert on_policy_loss(loss) == pytest.approx(expected, abs=1e-6)


ALL = ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo"]


@pytest.mark.fault(2)
@pytest.mark.parametrize("loss", ALL)
def test_parts_add_up_to_the_whole(loss):
    lengths = torch.randint(1, 9, (8,))
    weights = weights_of(lengths, loss)
    mask = torch.arange(8)[None] < lengths[:, None]
    token_loss = torch.randn(8, 8)
    whole = (token_loss * weights[:, None] * mask).sum()
    parts = [
        (token_loss[rows] * weights[rows, None] * mask[rows]).sum()
        for rows in torch.arange(8).split(3)
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.fault(10)
def test_masked_rows_leave_every_denominator():
    lengths, counted = [2, 6, 3, 4], torch.tensor([True, False, True, True])
    for loss in ALL:
        weights = weights_of(lengths, loss, counted=counted)
        assert weights[1] == 0
        if loss in {"grpo", "gspo", "sapo"}:
            assert weights.tolist() == pytest.approx([1 / 6, 0, 1 / 9, 1 / 12])
        elif loss in {"dapo", "cispo"}:
            assert weights.tolist() == pytest.approx([1 / 9, 0, 1 / 9, 1 / 9])
        elif loss == "dr_grpo":
            assert weights.tolist() == pytest.approx([1 / 30, 0, 1 / 30, 1 / 30])
        else:
            assert weights.tolist() == pytest.approx([1 / 4, 0, 1 / 14, 1 / 14])


def test_clip_higher_by_hand():
    # Ratios 1.5, 1.5, 0.5, 0.5 under advantages +1, -1, +1, -1; clip to [0.8, 1.28].
    ratio = torch.tensor([[1.5], [1.5], [0.5], [0.5]])
    result = surrogate(
        ratio.log(),
        old=torch.zeros(4, 1),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        clip_high=0.28,
    )
    assert result.loss.flatten().tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert result.clipped_high.flatten().tolist() == [True, False, False, False]
    assert result.clipped_low.flatten().tolist() == [False, False, False, True]


def test_dual_clip_bounds_only_negative_advantages():
    ratio = torch.tensor([[5.0], [5.0]])
    result = surrogate(ratio.log(), old=torch.zeros(2, 1), advantages=ADVANTAGES, dual_clip=3.0)
    assert result.loss.flatten().tolist() == pytest.approx([-1.2, 3.0])


def test_cispo_keeps_a_gradient_beyond_the_cap():
    logprobs = torch.tensor([[math.log(8.0)]], requires_grad=True)
    result = surrogate(
        logprobs, old=torch.zeros(1, 1), advantages=torch.ones(1), loss="cispo", clip_high=4.0
    )
    result.loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-5.0)
    assert result.clipped_high.item()


def test_gspo_has_one_ratio_for_a_completion():
    logprobs = torch.tensor([[0.3, -0.1, 9.0]])
    result = policy_loss(
        logprobs,
        old_logprobs=torch.zeros(1, 3),
        advantages=torch.ones(1),
        mask=torch.tensor([[True, True, False]]),
        loss="gspo",
        clip_low=0.2,
        clip_high=0.2,
    )
    assert result.loss[0, :2].tolist() == pytest.approx([-math.exp(0.1)] * 2)


def test_gradient_on_policy_is_the_policy_gradient_and_zero_where_clipped():
    logprobs = torch.tensor([[0.0], [math.log(2.0)]], requires_grad=True)
    old = torch.tensor([[0.0], [0.0]])
    advantages = torch.tensor([0.7, 0.7])
    surrogate(logprobs, old=old, advantages=advantages).loss.sum().backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-0.7, 0.0])
