"""Sensitivity: apportionment by hand, the schedule, the budget."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tropism.adaptation.placement import Sensitivity


def ranks(decision: Any) -> list[int]:
    return [entry["rank"] for entry in decision.value["plan"]]


def test_ranks_in_proportion(site: Any, observe: Any, ask: Any) -> None:
    # 12 components in all, half of them is 6: one each, then d'Hondt on 5 : 2 : 1
    # 5/2, 2/2, 1/2 -> first; 5/3, 2/2 -> first; 5/4, 2/2 -> first, now full
    sites = [site(i, debiased=d) for i, d in enumerate([5.0, 2.0, 1.0])]
    decision = ask(Sensitivity(budget=0.5), observe(*sites))
    assert ranks(decision) == [4, 1, 1]
    assert decision.value["truncate"] is True
    # then 2/2 and 2/3 against 1/2
    assert ranks(ask(Sensitivity(budget=8 / 12), observe(*sites))) == [4, 3, 1]
    flat = [site(i, debiased=1.0) for i in range(3)]
    assert ranks(ask(Sensitivity(budget=0.5), observe(*flat))) == [2, 2, 2]


def test_size_counts(site: Any, observe: Any, ask: Any) -> None:
    # 4 * 10 + 4 * 30 = 160, half is 80; one each takes 40: another of the big one, one of the small
    sites = [site(0, debiased=1.0), site(1, debiased=9.0, d_in=15, d_out=15)]
    assert ranks(ask(Sensitivity(budget=0.5), observe(*sites))) == [2, 2]


@pytest.mark.parametrize(
    ("rollout", "share", "expected"),
    [
        (0, 1.0, [4, 4, 4]),
        (100, 1.0, [4, 4, 4]),
        (150, 0.25 + 0.75 / 8, [2, 1, 1]),  # 46.75 of 136: 34 for one each, 11 for one more
        (200, 0.25, [1, 1, 1]),
        (999, 0.25, [1, 1, 1]),
    ],
)
def test_cubic_schedule(
    site: Any, observe: Any, ask: Any, rollout: int, share: float, expected: list[int]
) -> None:
    policy = Sensitivity(budget=0.25, start_rollout=100, end_rollout=200)
    sites = [site(0, debiased=1.0, d_in=6), site(1, debiased=1.0), site(2, debiased=1.0, d_in=8)]
    decision = ask(policy, observe(*sites, rollout=rollout))
    assert decision.value["share"] == pytest.approx(share)
    assert ranks(decision) == expected


def test_holds_and_refusals(site: Any, observe: Any, ask: Any) -> None:
    sites = [site(0, debiased=1.0), site(1, debiased=2.0)]
    assert ask(Sensitivity(), observe(*sites, z=1.0)).action == "hold"
    assert ask(Sensitivity(min_z=None), observe(*sites, z=1.0)).action == "apply"
    with pytest.raises(ValueError, match=r"Sensitivity\.min_rank=3: a budget of 0\.5 of rank 4"):
        ask(Sensitivity(min_rank=3), observe(*sites))
    with pytest.raises(ValueError, match=r"Sensitivity\.end_rollout=5: give start_rollout or more"):
        Sensitivity(start_rollout=6, end_rollout=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-1, 5), st.integers(1, 60)), min_size=1, max_size=20),
    st.floats(0.25, 1.0),
)
def test_budget_holds(
    site: Any, observe: Any, ask: Any, cases: list[tuple[float, int]], budget: float
) -> None:
    sites = [site(i, debiased=d, d_in=n) for i, (d, n) in enumerate(cases)]
    found = ranks(ask(Sensitivity(budget=budget), observe(*sites)))
    used = sum(r * (s.d_in + s.d_out) for r, s in zip(found, sites, strict=True))
    assert used <= budget * sum(4 * (s.d_in + s.d_out) for s in sites) * (1 + 1e-12)
    assert all(1 <= rank <= 4 for rank in found)
