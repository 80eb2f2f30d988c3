"""Fixed and CriticalGroups: sizes by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tropism.adaptation.contracts import RolloutObservation
from tropism.adaptation.rollouts import CriticalGroups, Fixed


def observe(
    noise: float | None, num_groups: int = 8, group_size: int = 8, probes: int = 12
) -> RolloutObservation:
    return RolloutObservation(10, 10, probes, num_groups, group_size, noise, 0.25)


def sizes(decision: Any) -> tuple[str, int, int]:
    return decision.action, decision.value["num_groups"], decision.value["group_size"]


def test_fixed_holds(ask: Any) -> None:
    assert sizes(ask(Fixed(), observe(99.0))) == ("hold", 8, 8)


@pytest.mark.parametrize(
    ("noise", "settings", "expected"),
    [
        (12.4, {}, ("apply", 12, 8)),
        (100.0, {}, ("apply", 16, 8)),  # at most twice
        (1.0, {}, ("apply", 4, 8)),  # at most half
        (8.7, {}, ("hold", 8, 8)),  # within 10 %
        (12.4, {"multiple": 0.5}, ("apply", 6, 8)),
        (100.0, {"max_step": 100.0}, ("apply", 64, 8)),
        (100.0, {"max_step": 100.0, "max_groups": 20}, ("apply", 20, 8)),
        (0.5, {"max_step": 100.0, "min_groups": 3}, ("apply", 3, 8)),
    ],
)
def test_groups_by_hand(
    ask: Any, noise: float, settings: dict[str, Any], expected: tuple[str, int, int]
) -> None:
    assert sizes(ask(CriticalGroups(**settings), observe(noise))) == expected


@pytest.mark.parametrize(
    ("noise", "num_groups", "group_size", "expected"),
    [
        (15.0, 8, 8, ("apply", 16, 4)),
        (30.0, 8, 8, ("apply", 16, 4)),  # 32 x 2 is more than a step away
        (5.0, 8, 8, ("apply", 4, 16)),  # 5/4 is nearer than 8/5
        (6.0, 8, 8, ("hold", 8, 8)),  # 8/6 is nearer than 6/4
        (9.0, 6, 10, ("hold", 6, 10)),  # 60 samples: no allowed size with 3 to 12 groups divides
        (16.0, 6, 8, ("apply", 12, 4)),
    ],
)
def test_equal_samples(
    ask: Any, noise: float, num_groups: int, group_size: int, expected: tuple[str, int, int]
) -> None:
    policy = CriticalGroups(equal_samples=True, group_sizes=(2, 4, 8, 16))
    if num_groups == 6 and group_size == 10:
        policy = CriticalGroups(equal_samples=True, group_sizes=(8, 16))
    decision = ask(policy, observe(noise, num_groups, group_size))
    assert sizes(decision) == expected
    assert decision.value["num_groups"] * decision.value["group_size"] == num_groups * group_size


def test_the_inverse_is_averaged(ask: Any) -> None:
    policy = CriticalGroups(smoothing=0.5, max_step=100.0)
    first = ask(policy, observe(8.0))
    assert first.action == "hold"
    # 1 / mean(1/8, 1/40) = 13.3, where the mean of the scales would be 24
    assert sizes(ask(policy, observe(40.0), first.state)) == ("apply", 13, 8)


@pytest.mark.parametrize(
    ("observation", "reason"),
    [
        (observe(None), "the noise scale is undefined"),
        (observe(-3.0), "the noise scale is undefined"),
        (observe(30.0, probes=7), "7 probes pooled, 8 are needed"),
    ],
)
def test_holds(ask: Any, observation: RolloutObservation, reason: str) -> None:
    decision = ask(CriticalGroups(), observation, {"average": [0.01, 1.0]})
    assert (decision.action, decision.reason) == ("hold", reason)
    assert decision.state == {"average": [0.01, 1.0]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(1e-3, 1e6), st.integers(1, 200), st.booleans())
def test_bounds_and_steps_hold(ask: Any, noise: float, now: int, equal_samples: bool) -> None:
    policy = CriticalGroups(min_groups=3, max_groups=40, equal_samples=equal_samples)
    decision = ask(policy, observe(noise, now))
    after = decision.value["num_groups"]
    if decision.action == "apply":
        assert 3 <= after <= 40
        if 3 <= now <= 40:
            assert now / 2 - 0.5 <= after <= now * 2
    else:
        assert after == now


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_groups": 0}, r"CriticalGroups\.min_groups=0"),
        ({"min_groups": 8, "max_groups": 4}, r"CriticalGroups\.max_groups=4: give min_groups=8"),
        ({"group_sizes": (1, 4)}, r"CriticalGroups\.group_sizes=\(1, 4\): name sizes of 2 or more"),
        ({"max_step": 1.0}, r"CriticalGroups\.max_step=1\.0"),
        ({"multiple": 0.0}, r"CriticalGroups\.multiple=0\.0"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CriticalGroups(**settings)
