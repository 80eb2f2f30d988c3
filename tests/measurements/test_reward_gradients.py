"""Norms and cosines per reward component against a backward for each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tropism.measurements.gradient_probe import GradientProbe
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.pressure_statistics import gram_matrices
from tropism.measurements.reward_gradients import RewardGradients, reward_gradients
from tropism.measurements.sketches import ExactGradients

COMPONENTS = ("correct", "format", "length", "absent")
NUM_PROMPTS, NUM_ROWS = 4, 3


class Model(nn.Module):
    """Two linears behind an embedding; sequences do not meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 8)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        """[m] log-probability of each row's tokens."""
        logits = self.second(torch.tanh(self.first(self.embed(tokens[:, :-1]))))
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum(dim=(1, 2))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(30, (NUM_PROMPTS, NUM_ROWS, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def advantages() -> Tensor:
    """[K, P, m]: each component's own share, centred; the last is zero everywhere."""
    values = torch.randn(4, NUM_PROMPTS, NUM_ROWS, generator=torch.Generator().manual_seed(2))
    values[2] = 0.6 * values[0] - values[1]  # not independent of the others
    values[3] = 0
    return values - values.mean(dim=2, keepdim=True)


def measured(model: Model, tokens: Tensor, advantages: Tensor) -> RewardGradients:
    linears = [(LinearSite(n, None, n), model.get_submodule(n)) for n in ("first", "second")]
    rows: list[list[Tensor]] = [[], []]
    with GradientProbe(linears, model.embed, ExactGradients()) as probe:
        for prompt in tokens:
            found = probe.backward(-model(prompt).sum()).rows
            for site, values in zip(rows, found, strict=True):
                site.append(values)
    return reward_gradients(
        gram_matrices([torch.cat(site) for site in rows]),
        advantages.flatten(1).double(),
        torch.arange(NUM_PROMPTS).repeat_interleave(NUM_ROWS),
        components=COMPONENTS,
    )


def backward(model: Model, tokens: Tensor, advantages: Tensor) -> list[Tensor]:
    """Gradient of -sum(a * logprob) at both weights, in a backward of its own."""
    loss = -(advantages.flatten() * model(tokens.flatten(0, -2))).sum()
    return list(torch.autograd.grad(loss, [model.first.weight, model.second.weight]))


def test_equal_to_a_backward_for_each(model: Model, tokens: Tensor, advantages: Tensor) -> None:
    found = measured(model, tokens, advantages)
    separate = [backward(model, tokens, a) for a in advantages]
    by_prompt = [
        [backward(model, t, ap) for t, ap in zip(tokens, a, strict=True)] for a in advantages
    ]
    for site in range(2):
        for k, component in enumerate(COMPONENTS[:3]):
            prompts = [gradients[site] for gradients in by_prompt[k]]
            raw = sum(float(g.square().sum()) for g in prompts) / NUM_PROMPTS
            cross = sum(
                float((g * h).sum()) for i, g in enumerate(prompts) for h in prompts[:i]
            ) / (NUM_PROMPTS * (NUM_PROMPTS - 1) / 2)
            assert found.raw_sq(component, site) == pytest.approx(raw, rel=1e-4)
            assert found.norm_sq(component, site) == pytest.approx(cross, rel=1e-4, abs=1e-4 * raw)
            total = float(separate[k][site].square().sum())
            assert float(found.products[site, k, k]) == pytest.approx(total, rel=1e-4)
            for other_k, other in enumerate(COMPONENTS[:3]):
                cosine = nn.functional.cosine_similarity(
                    separate[k][site].flatten(), separate[other_k][site].flatten(), dim=0
                )
                assert found.cosine(component, other, site) == pytest.approx(
                    float(cosine), abs=1e-4
                )


def test_over_sites_is_one_vector(model: Model, tokens: Tensor, advantages: Tensor) -> None:
    both = measured(model, tokens, advantages).over([True, True])
    k, other = (
        torch.cat([g.flatten() for g in backward(model, tokens, a)]) for a in advantages[:2]
    )
    cosine = nn.functional.cosine_similarity(k, other, dim=0)
    assert both.cosine("correct", "format") == pytest.approx(float(cosine), abs=1e-4)
    only = measured(model, tokens, advantages)
    assert only.over([False, True]).norm_sq("format") == pytest.approx(only.norm_sq("format", 1))
    total = sum(only.raw_sq("length", site) or 0 for site in range(2))
    assert both.raw_sq("length") == pytest.approx(total)


def test_undefined(model: Model, tokens: Tensor, advantages: Tensor) -> None:
    found = measured(model, tokens, advantages)
    assert found.norm_sq("absent") == 0.0
    assert found.cosine("absent", "correct") is None
    assert found.cosine("correct", "correct") == pytest.approx(1.0)
    alone = reward_gradients(
        torch.ones(1, 2, 2).double(),
        torch.ones(1, 2).double(),
        torch.zeros(2).long(),
        components=("correct",),
    )
    assert alone.norm_sq("correct") is None
    assert alone.raw_sq("correct") == 4.0
    empty = reward_gradients(
        torch.zeros(1, 0, 0).double(),
        torch.zeros(1, 0).double(),
        torch.zeros(0).long(),
        components=("correct",),
    )
    assert empty.raw_sq("correct") is None
    assert empty.over([False]).cosine("correct", "correct") is None
    assert math.isnan(float(empty.debiased))
