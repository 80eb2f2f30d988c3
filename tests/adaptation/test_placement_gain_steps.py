"""GainSteps: scales by hand, the gain that stays the same, and when it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tropism.adaptation.placement import GainSteps, Shuffled


def scales(decision: Any) -> list[float]:
    return [entry["lr_scale"] for entry in decision.value["plan"]]


@pytest.fixture
def measured(observe: Any) -> Any:
    return lambda *sites, z=5.0: replace(observe(*sites), gain_z=z)


def test_scales_by_hand(site: Any, measured: Any, ask: Any) -> None:
    # c (1 + 4) = 1 + 2, both within bounds
    decision = ask(GainSteps(), measured(site(0, gain=1.0), site(1, gain=2.0)))
    assert decision.action == "apply"
    assert scales(decision) == pytest.approx([0.6, 1.2])
    assert decision.scores == pytest.approx([1.0, 2.0])
    assert decision.value["gain_z"] == 5.0
    assert decision.reason == (
        "z of the gain 5.0 over 12 probes: step sizes 0.60 to 1.20 at 2 linears"
    )


def test_the_gain_stays_what_uniform_steps_have(site: Any, measured: Any, ask: Any) -> None:
    gains = [0.01, 0.3, 0.5, 1.0, 2.5]
    found = scales(ask(GainSteps(), measured(*(site(i, gain=g) for i, g in enumerate(gains)))))
    assert sum(s * g for s, g in zip(found, gains, strict=True)) == pytest.approx(sum(gains))
    assert found == sorted(found)
    assert found[0] == 0.25


def test_losses_take_the_least_and_the_unknown_stay(site: Any, measured: Any, ask: Any) -> None:
    sites = [site(0, gain=-1.0), site(1, gain=None), site(2, gain=1.0), site(3, gain=1.0)]
    assert scales(ask(GainSteps(), measured(*sites))) == pytest.approx([0.25, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("gain", "z", "reason"),
    [
        (1.0, None, "z of the gain undefined over 12 probes"),
        (1.0, 2.9, "z of the gain 2.9 over 12 probes, below 3"),
        (-1.0, 4.0, "z of the gain 4.0 over 12 probes, but no linear has gained"),
        (None, 4.0, "no linear has a defined gain (z of the gain 4.0 over 12 probes)"),
    ],
)
def test_holds(site: Any, measured: Any, ask: Any, gain: Any, z: Any, reason: str) -> None:
    decision = ask(GainSteps(), measured(site(0, gain=gain), site(1, gain=gain), z=z))
    assert (decision.action, decision.reason) == ("hold", reason)


def test_pooled_z_is_no_evidence_here(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(GainSteps(), observe(site(0, gain=1.0), site(1, gain=2.0), z=99.0))
    assert decision.action == "hold"


def test_evidence_adds_up_over_decisions(site: Any, measured: Any, ask: Any) -> None:
    observation = measured(site(0, gain=1.0), site(1, gain=2.0), z=2.5)
    first = ask(GainSteps(), observation)
    assert first.action == "hold"
    # means weigh 1/2 and 1/2: z = 2.5 / sqrt(1/2)
    second = ask(GainSteps(), observation, first.state)
    assert second.action == "apply"
    assert second.value["evidence_z"] == pytest.approx(2.5 * 2**0.5)


def test_shuffled_takes_gains_elsewhere(site: Any, measured: Any, ask: Any) -> None:
    sites = [site(i, gain=float(i)) for i in range(4)]
    found = scales(ask(Shuffled(policy=GainSteps()), measured(*sites)))
    own = scales(ask(GainSteps(), measured(*sites)))
    assert sorted(found) == pytest.approx(sorted(own))
    assert found != own
