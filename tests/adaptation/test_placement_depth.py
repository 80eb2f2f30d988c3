"""Depth: the cut by hand, and what keeps it where it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tropism.adaptation.placement import Depth

FREE: dict[str, Any] = {"dwell": 0, "hysteresis": 0.0, "smoothing": 0.0}


def layers(site: Any, *energies: float | None, **settings: Any) -> list[Any]:
    return [site(i, debiased=energy, **settings) for i, energy in enumerate(energies)]


def test_cut_by_hand(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    # f = 25 each; cost(l) = 25 (l + 2 (4 - l)) = 200, 175, 150, 125
    # captured 10, 9.9, 9.7, 6: per cost 0.05, 0.05657, 0.06467, 0.048
    decision = ask(Depth(**FREE), observe(*layers(site, 0.1, 0.2, 3.7, 6.0)))
    assert decision.value["cut"] == 2
    assert decision.value["gain"] == pytest.approx((9.7 / 150) / (10 / 200))
    assert [e.state for e in plan_of(decision)] == ["KEEP", "KEEP", "TRAIN", "TRAIN"]
    assert decision.reason == (
        "pooled z 9.0 over 12 probes: layers 2 to 3 train, 1.29 times the pressure per FLOP of "
        "all layers"
    )


def test_even_pressure_trains_everything(site: Any, observe: Any, ask: Any) -> None:
    for num_iterations in (1, 4):
        policy = Depth(num_iterations=num_iterations, **FREE)
        decision = ask(policy, observe(*layers(site, *[1.0] * 6)))
        assert (decision.action, decision.value["cut"]) == ("hold", 0)


def test_more_iterations_save_more_and_overhead_saves_less(
    site: Any, observe: Any, ask: Any
) -> None:
    # captured 10, 8.5: a cut at 1 costs 3/4 of all, with four iterations 9/16
    observation = observe(*layers(site, 2.0, 8.5))
    assert ask(Depth(**FREE), observation).value["cut"] == 1
    assert ask(Depth(overhead=2.0, **FREE), observation).value["cut"] == 0
    weaker = observe(*layers(site, 3.5, 6.5))  # 0.65 of the pressure
    assert ask(Depth(**FREE), weaker).value["cut"] == 0
    assert ask(Depth(num_iterations=4, **FREE), weaker).value["cut"] == 1


def test_flops_of_linears_without_adapters_count(site: Any, observe: Any, ask: Any) -> None:
    # captured 0.72; cost(1) / cost(0) = (25 + 50) / 100, or with the big linear above
    # (25 + 500 + 50) / 600
    sites = layers(site, 0.28, 0.72)
    assert ask(Depth(**FREE), observe(*sites)).value["cut"] == 0
    sites = layers(site, 0.22, 0.78)
    assert ask(Depth(**FREE), observe(*sites)).value["cut"] == 1
    big = site(1, "up", can_train=False, state="OFF", d_in=50)
    assert ask(Depth(**FREE), observe(*sites, big)).value["cut"] == 0


def test_min_layers(site: Any, observe: Any, ask: Any) -> None:
    observation = observe(*layers(site, 0.0, 0.0, 0.0, 1.0))
    assert ask(Depth(**FREE), observation).value["cut"] == 3
    assert ask(Depth(min_layers=3, **FREE), observation).value["cut"] == 1
    with pytest.raises(ValueError, match=r"Depth\.min_layers=5: 4 layers have adapters"):
        ask(Depth(min_layers=5, **FREE), observation)


def test_the_cut_sinks_again(
    site: Any, observe: Any, ask: Any, with_plan: Any, trained: Any, plan_of: Any
) -> None:
    observation = observe(*layers(site, 0.0, 1.0), step=0)
    first = ask(Depth(**FREE), observation)
    assert [e.state for e in plan_of(first)] == ["OFF", "TRAIN"]
    moved = with_plan(observation, first)
    moved = replace(moved, sites=tuple(replace(s, signals={"debiased": 1.0}) for s in moved.sites))
    assert trained(ask(Depth(**FREE), moved, first.state)) == ["0.q", "1.q"]


def test_hysteresis_and_dwell(site: Any, observe: Any, ask: Any, with_plan: Any) -> None:
    # a cut at 1 is better by 0.85 / 0.75 = 1.133
    observation = observe(*layers(site, 1.5, 8.5))
    assert ask(Depth(**{**FREE, "hysteresis": 0.14}), observation).action == "hold"
    policy = Depth(**{**FREE, "hysteresis": 0.13, "dwell": 2})
    first = ask(policy, observation)
    assert first.state["cut"] == [1, 0]
    moved = with_plan(observation, first)
    moved = replace(moved, sites=tuple(replace(s, signals={"debiased": 1.0}) for s in moved.sites))
    second = ask(policy, moved, first.state)
    assert (second.action, second.state["cut"]) == ("hold", [1, 1])
    assert "layer 1 is the cut for 1 of 2 decisions" in second.reason
    third = ask(policy, moved, second.state)
    assert (third.action, third.value["cut"]) == ("apply", 0)


def test_linears_outside_the_layers_stay(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    outside = [site(None, "proj", debiased=99.0), site(None, "embed", state="OFF")]
    decision = ask(Depth(**FREE), observe(*layers(site, 0.0, 1.0), *outside))
    assert [e.state for e in plan_of(decision)] == ["KEEP", "TRAIN", "TRAIN", "OFF"]


@pytest.mark.parametrize(
    ("energies", "settings", "reason"),
    [
        ((1.0, 2.0), {"z": 3.0}, "pooled z 3.0 over 12 probes, below 4"),
        ((None, None), {}, "no linear has a defined debiased"),
        ((-1.0, -2.0), {}, "but no linear has a positive debiased"),
    ],
)
def test_holds(
    site: Any, observe: Any, ask: Any, energies: Any, settings: dict[str, Any], reason: str
) -> None:
    decision = ask(Depth(**FREE), observe(*layers(site, *energies), **settings))
    assert decision.action == "hold"
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("signal", "raw"),
        ("num_iterations", 0),
        ("overhead", -1.0),
        ("min_layers", 0),
        ("dwell", -1),
        ("hysteresis", -0.1),
    ],
)
def test_refused_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Depth\.{setting}={value!r}: "):
        Depth(**{setting: value})


def test_dwell_after_a_rollback(site: Any, observe: Any, ask: Any) -> None:
    policy = Depth(**{**FREE, "dwell": 2})
    observation = observe(*layers(site, 0.0, 1.0))
    decision = ask(policy, observation)
    actions = []
    for _ in range(3):  # the guard put both layers back: two decisions of rest
        decision = ask(policy, observation, decision.state)
        actions.append(decision.action)
    assert actions == ["hold", "hold", "apply"]
