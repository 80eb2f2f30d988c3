"""PLoP's normalised feature norm and weight norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tropism.measurements.layer_names import LinearSite
from tropism.measurements.static_scores import feature_norm, plop, weight_norm


def sites(*linears: nn.Module) -> list[tuple[LinearSite, nn.Module]]:
    return [(LinearSite(f"l{i}", None, f"l{i}"), linear) for i, linear in enumerate(linears)]


def test_weight_norm_by_hand() -> None:
    assert weight_norm(torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]])) == pytest.approx(
        5 / 6**0.5
    )
    # In fp32 whatever the weight's type: 65536 entries of 0.01 overflow nothing and lose nothing.
    assert weight_norm(torch.full((256, 256), 0.01, dtype=torch.bfloat16)) == pytest.approx(
        float(torch.tensor(0.01).bfloat16()), rel=1e-5
    )


def test_feature_norm_by_hand() -> None:
    # W amplifies the first input direction only: ||W||_F = 2, expected norm of a unit input sqrt 2.
    weight, z = torch.tensor([[2.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert feature_norm(z @ weight.mT, z, weight) == pytest.approx((2**0.5 + 0) / 2)
    assert feature_norm(z[2:] @ weight.mT, z[2:], weight) is None


def test_random_inputs_score_one() -> None:
    torch.manual_seed(0)
    weight, z = torch.randn(96, 64), torch.randn(400, 64)
    random = torch.randn(400, 64)
    random *= z.norm(dim=1, keepdim=True) / random.norm(dim=1, keepdim=True)
    score = feature_norm(z @ weight.mT, z, weight)
    assert score == pytest.approx(1.0, abs=0.02)
    # The same as drawing z_rand for each token.
    drawn = (z @ weight.mT).norm(dim=1) / (random @ weight.mT).norm(dim=1)
    assert score == pytest.approx(float(drawn.mean()), abs=0.02)


def test_plop_reads_real_inputs() -> None:
    torch.manual_seed(0)
    first, second, unused = nn.Linear(6, 8), Conv1D(5, 8), nn.Linear(6, 6)
    nn.init.normal_(first.bias)
    nn.init.normal_(second.bias)
    tokens = torch.randn(2, 3, 6)
    found = plop(sites(first, second, unused), lambda: second(torch.tanh(first(tokens))))
    z, h = tokens.flatten(0, 1), torch.tanh(first(tokens)).flatten(0, 1)
    assert found[0] == pytest.approx(feature_norm(z @ first.weight.mT, z, first.weight))
    assert found[1] == pytest.approx(feature_norm(h @ second.weight, h, second.weight))
    assert found[2] is None
    assert not first._forward_hooks


def test_plop_leaves_padding_out() -> None:
    torch.manual_seed(0)
    linear, tokens = nn.Linear(6, 8), torch.randn(2, 3, 6)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    z = tokens[mask]
    expected = feature_norm(z @ linear.weight.mT, z, linear.weight)
    assert plop(sites(linear), lambda: linear(tokens), mask=mask)[0] == pytest.approx(expected)


def test_hooks_go_even_after_an_error() -> None:
    linear = nn.Linear(6, 8)
    with pytest.raises(RuntimeError):
        plop(sites(linear), lambda: linear(torch.zeros(2, 3)))
    assert not linear._forward_hooks
