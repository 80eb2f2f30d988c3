"""The gate: what it needs, how z adds up over decisions, and how often it opens on nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tropism.adaptation.evidence import Measured
from tropism.adaptation.smoothing import all_updated, updated, z_of


def test_average_by_hand() -> None:
    first = updated(None, 3.0, 0.5)
    assert first == [3.0, 1.0]
    second = updated(first, 5.0, 0.5)
    assert second == [4.0, 0.5]
    assert z_of(second) == pytest.approx(4 / 0.5**0.5)
    assert updated(second, None, 0.5) == second
    assert updated(None, None, 0.5) is None
    assert updated(second, 7.0, 0.0) == [7.0, 1.0]
    assert all_updated({"a": [1.0, 1.0]}, {"a": None, "b": 2.0, "c": None}, 0.9) == {
        "a": [1.0, 1.0],
        "b": [2.0, 1.0],
    }


def test_z_of_equal_terms_is_stouffers() -> None:
    # weights of smoothing 0.5 after four terms: 1/8, 1/8, 1/4, 1/2
    average = None
    for _ in range(4):
        average = updated(average, 2.0, 0.5)
    expected = 2.0 / (1 / 64 + 1 / 64 + 1 / 16 + 1 / 4) ** 0.5
    assert z_of(average) == pytest.approx(expected)


def test_evidence_adds_up_over_decisions(site: Any, observe: Any) -> None:
    policy, observation = Measured(min_z=4.0), observe(site(0, snr=0.1), z=3.0)
    first = policy.gather(observation, {}, "snr")
    assert first.objection == "pooled z 3.0 over 12 probes, below 4"
    assert first.numbers == {"pooled_z": 3.0, "evidence_z": 3.0}
    second = policy.gather(observe(site(0, snr=0.3), z=5.0), first.state, "snr")
    assert second.objection is None
    assert second.text == "pooled z 5.0 over 12 probes (5.7 with earlier decisions)"
    assert second.means["snr"] == (pytest.approx(0.2),)


@pytest.mark.parametrize(
    ("settings", "objection"),
    [
        ({"probes": 7}, "7 probes pooled, 8 are needed"),
        ({"z": None}, "pooled z undefined over 12 probes"),
        ({"z": 3.9}, "pooled z 3.9 over 12 probes, below 4"),
        ({}, None),
    ],
)
def test_what_it_needs(
    site: Any, observe: Any, settings: dict[str, Any], objection: str | None
) -> None:
    evidence = Measured().gather(observe(site(0, snr=0.1), **settings), {}, "snr")
    assert evidence.objection == objection


def test_a_signal_that_no_linear_has(site: Any, observe: Any) -> None:
    sites = [site(0, snr=None), site(1), site(2, can_train=False, snr=1.0)]
    evidence = Measured().gather(observe(*sites), {}, "snr")
    assert evidence.objection is not None
    assert evidence.objection.startswith("no linear has a defined snr")
    assert evidence.means["snr"] == (None, None, None)


def test_too_few_probes_leave_the_averages(site: Any, observe: Any) -> None:
    policy = Measured()
    state = policy.gather(observe(site(0, snr=0.1)), {}, "snr").state
    evidence = policy.gather(observe(site(0, snr=0.9), probes=2), state, "snr")
    assert evidence.state == state


def test_cooldown_after_a_rollback_counts_decisions(site: Any, observe: Any) -> None:
    policy, state = Measured(cooldown=2), {}
    found = []
    # rollbacks so far, probes: a rollback of before the first decision is not this policy's
    for num, probes in [
        (1, 12),
        (1, 12),
        (2, 12),
        (2, 3),
        (2, 12),
        (2, 12),
        (3, 12),
        (4, 12),
        (4, 12),
    ]:
        now = observe(site(0, snr=0.1), probes=probes, num_rollbacks=num)
        evidence = policy.gather(now, state, "snr")
        state = evidence.state
        found.append((evidence.objection or "").removeprefix("pooled z 9.0 over 12 probes "))
    text = "(9.0 with earlier decisions); held, the guard took a switch back: decision "
    assert [re.sub(r"\([\d.]+ with", "(9.0 with", objection) for objection in found] == [
        "",
        "",
        text + "1 of 2",
        "3 probes pooled, 8 are needed",
        text + "2 of 2",
        "",
        text + "1 of 2",
        text + "1 of 2",
        text + "2 of 2",
    ]
    assert state["cooldown"] == [4, 0]
    assert state["averages"]["snr"]["0.q"][0] == pytest.approx(0.1)  # which went on


def test_no_cooldown(site: Any, observe: Any) -> None:
    policy = Measured(cooldown=0)
    state = policy.gather(observe(site(0, snr=0.1)), {}, "snr").state
    now = observe(site(0, snr=0.1), num_rollbacks=1)
    assert policy.gather(now, state, "snr").objection is None


def test_no_gate_without_min_z(site: Any, observe: Any) -> None:
    policy = Measured(min_z=None)
    assert policy.gather(observe(site(0, snr=0.1), z=None), {}, "snr").objection is None
    assert policy.gather(observe(site(0, snr=0.1), z=-3.0), {}, "snr").objection is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("min_probes", -1),
        ("min_z", -0.1),
        ("min_z", float("inf")),
        ("cooldown", -1),
        ("smoothing", 1.0),
        ("smoothing", -0.1),
    ],
)
def test_refused_settings(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Measured\.{setting}={value}: give "):
        Measured(**{setting: value})  # type: ignore[arg-type]


def share_that_acts(site: Any, observe: Any, draw: Callable[[], float], runs: int) -> float:
    """Share of runs of 8 decisions in which the gate opens at least once."""
    policy, opened = Measured(), 0
    for _ in range(runs):
        state: dict[str, Any] = {}
        is_open = False
        for _ in range(8):
            evidence = policy.gather(observe(site(0, snr=0.1), z=draw()), state, "snr")
            state, is_open = evidence.state, is_open or evidence.objection is None
        opened += is_open
    return opened / runs


def test_gate_holds_on_a_skewed_null_and_opens_on_a_weak_signal(site: Any, observe: Any) -> None:
    rng = np.random.default_rng(0)

    def null() -> float:  # a standardised chi-square of 5: skewness 1.26, as a quadratic form has
        return float((rng.chisquare(5) - 5) / 10**0.5)

    assert share_that_acts(site, observe, null, runs=1000) < 0.08
    assert share_that_acts(site, observe, lambda: null() + 2.5, runs=300) > 0.9
