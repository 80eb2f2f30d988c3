"""KL at equal reward and equal speed, on runs whose KL is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from experiments.study import contrasts, speed

ROLLOUTS = np.arange(0, 70, 10)


def run(arm: str, rate: float, seed: int, *, speed: float, log_kl: float) -> pd.DataFrame:
    """Held-out pass 0.6 + 0.2 speed t / 60; KL at each pass as log_kl says, quicker runs paying."""
    held_out = 0.6 + 0.2 * speed * ROLLOUTS / 60
    to_level = 0.15 / 0.2 * 60 / speed
    kl = np.exp(log_kl - 1.5 * np.log(to_level)) * (held_out - 0.6) / 0.15
    return pd.DataFrame(
        {"stage": "gain", "arm": arm, "learning_rate": rate, "seed": seed, "rollout": ROLLOUTS,
         "held_out": held_out, "kl_in": kl}
    )  # fmt: skip


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.setattr(contrasts, "level_at", lambda results, share: 0.6 + 0.2 * share)
    parts = []
    for seed in range(4):
        height = 0.1 * seed
        for rate, quick in ((1e-4, 0.9), (2e-4, 1.1), (4e-4, 2.0)):
            parts.append(run("uniform", rate, seed, speed=quick, log_kl=height))
        for rate, quick in ((1e-4, 1.0), (2e-4, 1.7)):
            saved = 0.2 + 0.01 * seed
            parts.append(run("gain_steps", rate, seed, speed=quick, log_kl=height - saved))
            parts.append(run("gain_shuffled", rate, seed, speed=0.9 * quick, log_kl=height))
    return pd.concat(parts, ignore_index=True)


def test_speed_is_no_saving(results: pd.DataFrame) -> None:
    found = speed.primary(results)
    by_control = found.set_index("control")
    assert list(by_control.index) == ["uniform", "gain_shuffled"]
    assert by_control["difference"].to_list() == pytest.approx([-0.215, -0.215])
    assert (found["p"] == 2 / 16).all()
    assert (found["corrected"] == 4 / 16).all()
    assert by_control["level"].to_list() == pytest.approx([0.75, 0.75])


def test_half_way_where_a_run_never_arrives(results: pd.DataFrame) -> None:
    slow = run("gain_shuffled", 1e-4, 3, speed=0.6, log_kl=0.3)
    is_it = (results["arm"] == "gain_shuffled") & (results["learning_rate"] == 1e-4)
    table = pd.concat([results[~(is_it & (results["seed"] == 3))], slow])
    by_control = speed.primary(table).set_index("control")
    assert by_control["level"].to_list() == pytest.approx([0.75, 0.7])


def test_uniform_is_its_own_line(results: pd.DataFrame) -> None:
    above = speed.beside_uniform(results, 0.75)
    assert above["uniform"].to_list() == pytest.approx([0, 0, 0, 0], abs=1e-9)
    assert above["gain_steps"].to_list() == pytest.approx([-0.2, -0.21, -0.22, -0.23])
