"""What step sizes could save, by hand and on planted moves."""

import numpy as np
import pandas as pd
import pytest

from tropism.measurements.ceiling import by_gain, ceiling, kl_ratio, only, ridge, shared, shuffled

RNG = np.random.default_rng(0)


def test_ratio_by_hand():
    gain, curvature = np.array([1.0, 3.0]), np.diag([1.0, 2.0])
    # uniform: 3 / 16; (2, 0): 4 / 4; (0, 1): 2 / 9
    assert kl_ratio(np.array([2.0, 0.0]), gain, curvature) == pytest.approx(16 / 3)
    assert kl_ratio(np.array([0.0, 1.0]), gain, curvature) == pytest.approx(2 / 9 * 16 / 3)
    assert kl_ratio(np.array([7.0, 7.0]), gain, curvature) == pytest.approx(1.0)


def test_a_ridge_of_nothing_is_the_least_and_a_large_one_the_gain():
    gain = RNG.normal(size=4)
    half = RNG.normal(size=(4, 9))
    curvature = half @ half.T
    best = kl_ratio(ridge(0)(gain, curvature, RNG), gain, curvature)
    for _ in range(100):
        assert kl_ratio(RNG.normal(size=4), gain, curvature) >= best
    large = ridge(1e9)(gain, curvature, RNG)
    np.testing.assert_allclose(large / large[0], gain / gain[0], rtol=1e-6)
    assert kl_ratio(gain, gain, curvature) >= best


def test_shuffled_stays_within_modules():
    gain = np.array([1.0, -2.0, 3.0, 40.0, 50.0])
    steps = shuffled(["q", "q", "q", "v", "v"])(gain, np.eye(5), RNG)
    assert sorted(steps[:3]) == [0.0, 1.0, 3.0]
    assert sorted(steps[3:]) == [40.0, 50.0]
    assert list(by_gain(gain, np.eye(5), RNG)) == [1.0, 0.0, 3.0, 40.0, 50.0]
    assert list(only([True, False])(gain[:2], np.eye(2), RNG)) == [1.0, 0.0]


@pytest.mark.parametrize(("second", "expected"), [([1.0, 2.0], 0.5), ([-2.0, 1.0], 0.0)])
def test_shared(second, expected):
    assert shared(np.array([[1.0, 2.0], second]).T) == pytest.approx(expected)


def moves(*, num_prompts: int, gains: list[float]) -> pd.DataFrame:
    """Two completions a prompt; a change is gains[l] times the advantage, and noise."""
    rows = []
    for prompt in range(num_prompts):
        for advantage in (1.0, -1.0):
            changes = RNG.normal(size=len(gains)) + advantage * np.array(gains)
            rows.append({"prompt": prompt, "advantage": advantage, "changes": list(changes)})
    return pd.DataFrame(rows)


def test_linears_that_gain_nothing_are_found_on_unseen_prompts():
    # One of four linears gains: with it alone a quarter of the noise is paid.
    table = moves(num_prompts=4000, gains=[2.0, 0.0, 0.0, 0.0])
    found = ceiling(table, {"gain": by_gain, "it": only([1, 0, 0, 0])}, rng=RNG)
    ratios = dict(zip(found["steps"], found["kl_ratio"], strict=True))
    # uniform (4 + 2^2) / 2^2, the linear alone (1 + 2^2) / 2^2
    assert ratios["it"] == pytest.approx(5 / 8, rel=0.05)
    assert ratios["gain"] == pytest.approx(ratios["it"], rel=0.05)


def test_alike_linears_cannot_be_bettered():
    table = moves(num_prompts=200, gains=[0.5] * 6)
    found = ceiling(table, {"ridge": ridge(0.1), "gain": by_gain}, rng=RNG)
    assert (found["kl_ratio"] > 0.97).all()
