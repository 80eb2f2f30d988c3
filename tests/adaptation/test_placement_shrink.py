"""SignalShrink: scales by hand, matching, and what keeps its scale of 1."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tropism.adaptation.contracts import SiteObservation
from tropism.adaptation.placement import SignalShrink


def scales(decision: Any) -> list[float]:
    return [entry["lr_scale"] for entry in decision.value["plan"]]


def test_scales_by_hand(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    sites = [site(0, snr=0.1), site(1, snr=0.2), site(2, snr=0.4)]
    decision = ask(SignalShrink(), observe(*sites))
    c = math.sqrt(3 / 5.25)
    assert decision.action == "apply"
    assert scales(decision) == pytest.approx([0.5 * c, c, 2 * c], rel=1e-12)
    assert decision.value["energy_ratio"] == pytest.approx(1.0, rel=1e-12)
    assert decision.value["pooled_z"] == 9.0
    assert decision.scores == pytest.approx([0.1, 0.2, 0.4])
    assert all(e.state == "TRAIN" and e.rank == 4 for e in plan_of(decision))
    assert decision.reason == (
        "pooled z 9.0 over 12 probes: step sizes 0.38 to 1.51 at 3 of 3 linears"
    )


def test_size_counts_in_the_matching(site: Any, observe: Any, ask: Any) -> None:
    # n = 4 * 10 and 4 * 30; c^2 (1 * 40 + 4 * 120) = 160
    sites = [site(0, snr=0.1), site(1, snr=0.2, d_in=10, d_out=20)]
    c = math.sqrt(160 / 520)
    assert scales(ask(SignalShrink(), observe(*sites))) == pytest.approx([c, 2 * c], rel=1e-12)


def test_uncertain_linears_stay_at_one_and_out_of_the_matching(
    site: Any, observe: Any, ask: Any
) -> None:
    known = [site(0, snr=0.1), site(1, snr=0.2), site(2, snr=0.4)]
    unknown = [
        site(3, snr=5.0, z=1.9, lr_scale=0.3),
        site(4, snr=0.001, z=-1.0),
        site(5, snr=0.1, z=None),
        site(6, snr=None, z=7.0),
    ]
    alone = scales(ask(SignalShrink(), observe(*known)))
    decision = ask(SignalShrink(), observe(*known, *unknown))
    assert scales(decision) == [*alone, 1.0, 1.0, 1.0, 1.0]
    # summed over all of them, uniform's total still holds
    assert math.fsum(scale**2 for scale in scales(decision)) == pytest.approx(7.0, rel=1e-12)


def test_clipping_wins_where_matching_cannot_hold(site: Any, observe: Any, ask: Any) -> None:
    # n = 400, 40, 40 (times 4): 0.0625 * 400 + 4 * 80 = 345 of 480
    sites = [
        site(0, snr=-0.2, d_in=50, d_out=50),
        site(1, snr=0.1),
        site(2, snr=0.1),
    ]
    decision = ask(SignalShrink(), observe(*sites))
    assert scales(decision) == [0.25, 2.0, 2.0]
    assert decision.value["energy_ratio"] == pytest.approx(345 / 480)
    assert decision.scores == (0.0, 0.1, 0.1)


def test_only_shrink(site: Any, observe: Any, ask: Any) -> None:
    snr = [0.02, 0.1, 0.2, 0.3, 2.0]  # ratios 0.1, 0.5, 1, 1.5, 10
    observation = observe(*(site(i, snr=value) for i, value in enumerate(snr)))
    decision = ask(SignalShrink(only_shrink=True), observation)
    assert scales(decision) == pytest.approx([0.25, 0.5, 1.0, 1.0, 1.0])
    assert decision.value["energy_ratio"] == pytest.approx((0.0625 + 0.25 + 3) / 5)


def test_snr_is_averaged_over_decisions(site: Any, observe: Any, ask: Any, with_plan: Any) -> None:
    observation = observe(site(0, snr=0.1), site(1, snr=0.4))
    first = ask(SignalShrink(smoothing=0.75), observation)
    moved = with_plan(observation, first)
    moved = replace(
        moved,
        sites=(
            replace(moved.sites[0], signals={"snr": 0.5}),
            replace(moved.sites[1], signals={"snr": None}),
        ),
    )
    second = ask(SignalShrink(smoothing=0.75), moved, first.state)
    assert second.scores == pytest.approx([0.75 * 0.1 + 0.25 * 0.5, 0.4])


@pytest.mark.parametrize(
    ("sites", "reason"),
    [
        (
            [{"snr": 0.1, "z": 1.0}, {"snr": 0.2, "z": 3.0}],
            "but 1 linears have z >= 2: two are needed",
        ),
        (
            [{"snr": 0.0}, {"snr": 0.0}, {"snr": 1.0}],
            "but 3 linears have z >= 2: their median snr is 0",
        ),
        ([{"snr": None}, {"snr": None}], "no linear has a defined snr"),
    ],
)
def test_holds(site: Any, observe: Any, ask: Any, sites: list[dict[str, Any]], reason: str) -> None:
    decision = ask(SignalShrink(), observe(*(site(i, **s) for i, s in enumerate(sites))))
    assert decision.action == "hold"
    assert reason in decision.reason


def test_holds_without_evidence_but_learns(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(SignalShrink(), observe(site(0, snr=0.1), site(1, snr=0.2), z=1.0))
    assert (decision.action, decision.value["pooled_z"]) == ("hold", 1.0)
    assert decision.state["averages"]["snr"] == {"0.q": [0.1, 1.0], "1.q": [0.2, 1.0]}


@pytest.mark.parametrize(
    ("setting", "value"),
    [("low", 0.0), ("low", 1.5), ("high", 0.9), ("high", math.inf), ("rank", 0)],
)
def test_refused_settings(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"SignalShrink\.{setting}="):
        SignalShrink(**{setting: value})  # type: ignore[arg-type]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(1e-4, 1.0), st.integers(1, 3000), st.floats(-3, 9)),
        min_size=2,
        max_size=30,
    )
)
def test_squared_updates_match_uniforms(
    site: Any, observe: Any, ask: Any, cases: list[tuple[float, int, float]]
) -> None:
    sites: list[SiteObservation] = [
        site(i, snr=snr, d_in=d_in, z=z) for i, (snr, d_in, z) in enumerate(cases)
    ]
    decision = ask(SignalShrink(), observe(*sites))
    size = [4 * (s.d_in + s.d_out) for s in sites]
    energy = math.fsum(m * m * n for m, n in zip(scales(decision), size, strict=True))
    assert energy == pytest.approx(sum(size), rel=1e-9)
    assert all(0.25 <= m <= 2.0 for m in scales(decision))
