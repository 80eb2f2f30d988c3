"""Each arm of the positive control stands at its own best rate, paired by model."""

from __future__ import annotations

import pandas as pd
import pytest
from experiments.study import positive_control

PASSES = {  # stage, arm, rate -> held-out pass of models 0 and 1
    ("planted", "uniform", 1e-3): (0.60, 0.62),
    ("planted", "uniform", 5e-4): (0.50, 0.70),  # better in one model, worse in the mean
    ("planted", "oracle", 1e-3): (0.50, 0.52),
    ("oracle", "oracle", 4e-3): (0.64, 0.68),
    ("oracle", "oracle", 8e-3): (0.90,),  # one model only: no rate of the arm
    ("oracle", "oracle_of_another", 4e-3): (0.55, 0.57),
    ("planted", "depth", 1e-3): (0.99, 0.99),  # no part of this
}


@pytest.fixture
def ends() -> pd.DataFrame:
    rows = [
        {"stage": stage, "twin": "planted", "arm": arm, "learning_rate": rate, "group_size": 8,
         "seed": model, "rollout": rollout, "held_out": held_out if rollout else 0.4,
         "held_out_n": 512}
        for (stage, arm, rate), passes in PASSES.items()
        for model, held_out in enumerate(passes)
        for rollout in (0, 60)
    ]  # fmt: skip
    return positive_control.last_passes(pd.DataFrame(rows))


def test_the_best_rate_is_that_of_the_mean_over_all_models(ends: pd.DataFrame) -> None:
    rates = {
        arm: set(positive_control.at_best_rate(ends, arm)["learning_rate"])
        for arm in positive_control.ARMS
    }
    assert rates == {"uniform": {1e-3}, "oracle": {4e-3}, "oracle_of_another": {4e-3}}


def test_differences_are_paired_by_model(ends: pd.DataFrame) -> None:
    found = positive_control.difference(ends, "oracle", "oracle_of_another")
    assert found.value == pytest.approx((0.09 + 0.11) / 2)
    assert found.n == 2
    assert found.low < found.value < found.high
    assert positive_control.difference(ends, "oracle", "uniform").value == pytest.approx(0.05)
