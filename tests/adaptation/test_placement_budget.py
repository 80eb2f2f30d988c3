"""TopBudget: who enters, the floor, dwell and hysteresis, and that the budget holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tropism.adaptation.placement import TopBudget

FREE: dict[str, Any] = {"floor": 0.0, "dwell": 0, "hysteresis": 0.0, "smoothing": 0.0}


def rescored(observation: Any, *scores: float | None) -> Any:
    """The same linears with other snr."""
    sites = (
        replace(site, signals={"snr": score})
        for site, score in zip(observation.sites, scores, strict=True)
    )
    return replace(observation, sites=tuple(sites))


def test_best_within_the_budget(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    observation = observe(*(site(i, snr=snr) for i, snr in enumerate([0.1, 0.4, 0.2, 0.3])))
    decision = ask(TopBudget(budget=0.5, **FREE), observation)
    assert [e.state for e in plan_of(decision)] == ["KEEP", "TRAIN", "KEEP", "TRAIN"]
    assert decision.value["share"] == 0.5
    assert decision.value["jaccard"] == 0.5
    assert decision.scores == (0.1, 0.4, 0.2, 0.3)
    assert decision.reason == (
        "pooled z 9.0 over 12 probes: 2 linears by snr hold 50% of the parameters, "
        "0 enter and 2 leave"
    )


def test_a_linear_that_no_longer_fits_is_passed_over(
    site: Any, observe: Any, ask: Any, trained: Any
) -> None:
    # sizes 100, 60, 40 of 200 in all (per component), 110 to spend
    sites = [
        site(0, snr=0.3, d_in=50, d_out=50),
        site(1, snr=0.2, d_in=30, d_out=30),
        site(2, snr=0.1, d_in=20, d_out=20),
    ]
    assert trained(ask(TopBudget(budget=0.55, **FREE), observe(*sites))) == ["0.q"]
    swapped = rescored(observe(*sites), 0.1, 0.3, 0.2)
    assert trained(ask(TopBudget(budget=0.55, **FREE), swapped)) == ["1.q", "2.q"]


def test_smaller_ranks_fit_more(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    observation = observe(*(site(i, snr=0.1 + i) for i in range(4)))
    plan = plan_of(ask(TopBudget(budget=0.25, rank=1, **FREE), observation))
    assert [(e.state, e.rank) for e in plan] == [("TRAIN", 1)] * 4


def test_floor_gives_each_layer_its_best(site: Any, observe: Any, ask: Any, trained: Any) -> None:
    # layer 0 has all the signal; a floor of a quarter of a layer is one of its four linears
    sites = [
        site(layer, module, snr=(1.0 if layer == 0 else 0.1) + 0.01 * i)
        for layer in range(2)
        for i, module in enumerate("qkvo")
    ]
    policy = TopBudget(budget=0.5, **{**FREE, "floor": 0.25})
    assert trained(ask(policy, observe(*sites))) == ["0.k", "0.v", "0.o", "1.o"]
    rich = TopBudget(budget=0.5, **FREE)
    assert trained(ask(rich, observe(*sites))) == ["0.q", "0.k", "0.v", "0.o"]
    even = TopBudget(budget=0.5, **{**FREE, "floor": 0.5})
    assert trained(ask(even, observe(*sites))) == ["0.v", "0.o", "1.v", "1.o"]


def test_floor_that_no_linear_fits_is_refused(site: Any, observe: Any, ask: Any) -> None:
    policy = TopBudget(budget=0.4, **{**FREE, "floor": 0.1})
    observation = observe(site(0, "q", snr=1.0), site(0, "k", snr=1.0), probes=0)
    with pytest.raises(ValueError, match=r"TopBudget\.budget=0\.4: the smallest .* layer 0 .*0\.5"):
        ask(policy, observation)


def test_hysteresis(site: Any, observe: Any, ask: Any, trained: Any, with_plan: Any) -> None:
    policy = TopBudget(budget=0.5, **{**FREE, "hysteresis": 0.2})
    observation = observe(site(0, snr=0.2), site(1, snr=0.1))
    first = ask(policy, observation)
    assert trained(first) == ["0.q"]
    moved = with_plan(observation, first)
    close = ask(policy, rescored(moved, 0.2, 0.239), first.state)
    assert (close.action, trained(close)) == ("hold", ["0.q"])
    over = ask(policy, rescored(moved, 0.2, 0.241), first.state)
    assert (over.action, trained(over)) == ("apply", ["1.q"])


def test_dwell(site: Any, observe: Any, ask: Any, trained: Any, with_plan: Any) -> None:
    policy = TopBudget(budget=0.5, **{**FREE, "dwell": 2})
    observation = observe(site(0, snr=0.2), site(1, snr=0.1))
    first = ask(policy, observation)  # free at first sight
    assert trained(first) == ["0.q"]
    moved = rescored(with_plan(observation, first), 0.1, 0.9)
    second = ask(policy, moved, first.state)
    # 1.q left in the first decision and stays out in this one too, whatever it scores
    assert (second.action, trained(second)) == ("hold", ["0.q"])
    third = ask(policy, rescored(with_plan(moved, second), 0.1, 0.9), second.state)
    assert trained(third) == ["1.q"]


def test_dwell_after_a_rollback(site: Any, observe: Any, ask: Any, trained: Any) -> None:
    policy = TopBudget(budget=0.5, **{**FREE, "dwell": 2})
    observation = observe(site(0, snr=0.2), site(1, state="KEEP", snr=0.9))
    state = ask(policy, observation).state
    assert state["clock"] == {"0.q": [False, 0], "1.q": [True, 0]}
    for wanted in (["0.q"], ["0.q"], ["1.q"]):  # the guard put it back: two decisions of rest
        decision = ask(policy, observation, state)
        state = decision.state
        assert trained(decision) == wanted


def test_undefined_scores_stay_as_they_are(site: Any, observe: Any, ask: Any, trained: Any) -> None:
    observation = observe(
        site(0, snr=None), site(1, snr=0.1), site(2, snr=0.9), site(3, state="KEEP", snr=None)
    )
    assert trained(ask(TopBudget(budget=0.5, **FREE), observation)) == ["0.q", "2.q"]
    full = ask(TopBudget(budget=0.2, **FREE), observation)
    assert full.action == "hold"
    assert "linears that must stay exceed the budget" in full.reason


def test_signs_of_scores(site: Any, observe: Any, ask: Any) -> None:
    observation = observe(site(0, snr=-0.2, consistency=-0.3), site(1, snr=0.1, consistency=0.2))
    assert ask(TopBudget(**FREE), observation).scores == (0.0, 0.1)
    assert ask(TopBudget(signal="consistency", **FREE), observation).scores == (-0.3, 0.2)


def test_holds_without_evidence(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(TopBudget(**FREE), observe(site(0, snr=0.1), site(1, snr=0.2), z=2.0))
    assert (decision.action, decision.reason) == (
        "hold",
        "pooled z 2.0 over 12 probes, below 4",
    )


@pytest.mark.parametrize("signal", ["raw", "debiased", "update_norm"])
def test_rank_variant_signals_need_a_word(signal: str) -> None:
    with pytest.raises(ValueError, match=rf"TopBudget\.signal='{signal}': it grows .*'snr'"):
        TopBudget(signal=signal)
    assert TopBudget(signal=signal, allow_rank_variant=True).signal == signal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signal": "luck"}, r"TopBudget\.signal='luck': choose from"),
        ({"budget": 0.0}, r"TopBudget\.budget=0\.0: give a share in \(0, 1\]"),
        ({"budget": 0.2, "floor": 0.3}, r"TopBudget\.floor=0\.3: give a share in \[0, budget\]"),
        ({"dwell": -1}, r"TopBudget\.dwell=-1"),
        ({"hysteresis": -0.1}, r"TopBudget\.hysteresis=-0\.1"),
    ],
)
def test_refused_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopBudget(**arguments)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.floats(-1, 1),
            st.integers(1, 99),
            st.sampled_from(["TRAIN", "OFF"]),
        ),
        min_size=1,
        max_size=25,
    ),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 3),
)
def test_budget_is_never_exceeded_and_no_layer_starves(
    site: Any,
    observe: Any,
    ask: Any,
    plan_of: Any,
    with_plan: Any,
    cases: list[tuple[int, float, int, str]],
    budget: float,
    floor_share: float,
    dwell: int,
) -> None:
    floor = floor_share * budget
    policy = TopBudget(budget=budget, floor=floor, dwell=dwell)
    observation = observe(
        *(
            site(layer, f"m{i}", snr=snr, d_in=d_in, state=state)
            for i, (layer, snr, d_in, state) in enumerate(cases)
        )
    )
    size = [4 * (s.d_in + s.d_out) for s in observation.sites]
    layers = [s.plan.layer for s in observation.sites]
    whole = {
        layer: sum(n for n, at in zip(size, layers, strict=True) if at == layer) for layer in layers
    }
    has_room = all(
        min(n for n, at in zip(size, layers, strict=True) if at == layer) <= budget * whole[layer]
        for layer in layers
    )
    if floor > 0 and not has_room:
        with pytest.raises(ValueError, match=r"TopBudget\.budget"):
            ask(policy, observation)
        return
    state: dict[str, Any] = {}
    for turn in range(4):
        decision = ask(policy, observation, state)
        plan = plan_of(decision)
        trains = [entry.state == "TRAIN" for entry in plan]
        if decision.action == "apply":
            used = sum(n for n, is_on in zip(size, trains, strict=True) if is_on)
            assert used <= budget * sum(size) * (1 + 1e-12)
            if floor > 0 and turn == 0:
                assert {at for at, is_on in zip(layers, trains, strict=True) if is_on} == set(
                    layers
                )
        scores = [-(site.signals["snr"] or 0.0) for site in observation.sites]
        observation, state = (
            rescored(with_plan(observation, decision), *scores),
            dict(decision.state),
        )
