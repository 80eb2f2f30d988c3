"""OneShot, Rotate, SwitchOnly, Shuffled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tropism.adaptation.decide import make
from tropism.adaptation.placement import (
    Depth,
    OneShot,
    Rotate,
    Sensitivity,
    Shuffled,
    SignalShrink,
    SwitchOnly,
    TopBudget,
    Uniform,
)

FREE: dict[str, Any] = {"floor": 0.0, "dwell": 0, "hysteresis": 0.0, "smoothing": 0.0}
FULL = pytest.approx(0.5)


def at(observation: Any, rollout: int) -> Any:
    return replace(observation, rollout=rollout)


# -- OneShot -------------------------------------------------------------------------------------


def test_one_shot_waits_averages_and_then_holds_for_ever(
    site: Any, observe: Any, ask: Any, trained: Any, with_plan: Any
) -> None:
    policy = OneShot(policy=TopBudget(budget=0.5, **{**FREE, "smoothing": 0.5}), after_rollouts=20)
    early = ask(policy, observe(site(0, snr=0.8), site(1, snr=0.1), rollout=10))
    assert (early.action, early.reason) == ("hold", "one shot is due after rollout 20")
    assert early.value["pooled_z"] == 9.0
    weak = ask(policy, observe(site(0, snr=0.1), site(1, snr=0.3), rollout=20, z=0.0), early.state)
    assert weak.action == "hold"  # due, but without evidence
    observation = observe(site(0, snr=0.1), site(1, snr=0.3), rollout=30)
    shot = ask(policy, observation, weak.state)
    # averages: 0.8 -> 0.45 -> 0.275 against 0.1 -> 0.2 -> 0.25
    assert (shot.action, trained(shot)) == ("apply", ["0.q"])
    moved = replace(with_plan(observation, shot), pooled_z=99.0)
    after = ask(policy, moved, shot.state)
    assert (after.action, after.reason, after.state) == ("hold", "one shot, taken", shot.state)


def test_one_shot_drops_early_answers_of_policies_without_a_gate(
    site: Any, observe: Any, ask: Any
) -> None:
    policy = OneShot(policy=Uniform(), after_rollouts=5)
    observation = observe(site(0, state="OFF"), rollout=0)
    early = ask(policy, observation)
    assert (early.action, early.state) == ("hold", {"policy": {}, "is_done": False})
    assert ask(policy, at(observation, 5), early.state).action == "apply"


# -- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        SignalShrink(),
        TopBudget(dwell=0, floor=0.0),
        Depth(dwell=0, signal="snr", overhead=0.0),
        Sensitivity(signal="snr"),
        Shuffled(policy=SignalShrink()),
        SwitchOnly(policy=SignalShrink()),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_what_the_guard_took_back_is_not_proposed_again_at_once(
    site: Any, observe: Any, ask: Any, policy: Any
) -> None:
    signals = [0.01, 0.02, 0.03, 0.9]
    observation = observe(*(site(i, snr=snr) for i, snr in enumerate(signals)))
    first = ask(policy, observation)
    back = replace(observation, num_rollbacks=1)  # the plan of before, and the same map
    actions, state = [], first.state
    for _ in range(3):
        decision = ask(policy, back, state)
        actions.append(decision.action)
        state = decision.state
    if not isinstance(policy, SwitchOnly):  # which imagines that its plan is in force
        assert (first.action, actions) == ("apply", ["hold", "hold", "apply"])
        assert decision.value["plan"] == first.value["plan"]
    assert "guard took a switch back" in ask(policy, back, first.state).reason


# -- Rotate --------------------------------------------------------------------------------------


def test_rotate_draws_anew_after_each_dwell(
    site: Any, observe: Any, ask: Any, trained: Any, with_plan: Any
) -> None:
    policy = Rotate(num_sites=3, dwell=2)
    observation = observe(*(site(i) for i in range(12)))
    state: dict[str, Any] = {}
    seen = []
    for _ in range(6):
        decision = ask(policy, observation, state)
        seen.append(trained(decision))
        observation, state = with_plan(observation, decision), dict(decision.state)
    assert [len(keys) for keys in seen] == [3] * 6
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2] != seen[4]


def test_rotate_is_fair_and_its_offset_is_another_rotation(
    site: Any, observe: Any, trained: Any
) -> None:
    observation = observe(*(site(i) for i in range(6)))

    def draws(policy: Rotate) -> list[list[str]]:
        return [trained(make(policy, observation, {}, (0, 1, i))) for i in range(600)]

    draws_of_seed = draws(Rotate(num_sites=2))
    assert draws_of_seed == draws(Rotate(num_sites=2))
    counts = Counter(key for keys in draws_of_seed for key in keys)
    assert all(150 < counts[f"{i}.q"] < 250 for i in range(6))  # 200 expected, sd 11.5
    other = draws(Rotate(num_sites=2, seed_offset=1))
    assert sum(a == b for a, b in zip(draws_of_seed, other, strict=True)) < 100  # 40 by chance


def test_rotate_by_share_never_exceeds_it(site: Any, observe: Any, trained: Any) -> None:
    sites = [site(i, d_in=10 * (i + 1)) for i in range(8)]
    size = {s.plan.key: s.d_in + s.d_out for s in sites}
    budget = 0.3 * sum(size.values())
    for i in range(100):
        keys = trained(make(Rotate(share=0.3), observe(*sites), {}, (0, 1, i)))
        used = sum(size[key] for key in keys)
        left_out = min(n for key, n in size.items() if key not in keys)
        assert used <= budget < used + left_out


def test_rotate_refusals(site: Any, observe: Any, ask: Any) -> None:
    with pytest.raises(ValueError, match=r"Rotate\.num_sites=None: with share=None, give exactly"):
        Rotate()
    with pytest.raises(ValueError, match=r"Rotate\.num_sites=2: with share=0\.5, give exactly"):
        Rotate(num_sites=2, share=0.5)
    with pytest.raises(ValueError, match=r"Rotate\.num_sites=3: 2 linears have adapters"):
        ask(Rotate(num_sites=3), observe(site(0), site(1)))
    with pytest.raises(ValueError, match=r"Rotate\.share=0\.1: no linear is so small"):
        ask(Rotate(share=0.1), observe(site(0), site(1)))


# -- SwitchOnly ----------------------------------------------------------------------------------


def test_switch_only_follows_the_schedule_and_leaves_the_plan(
    site: Any, observe: Any, ask: Any, plan_of: Any
) -> None:
    policy = SwitchOnly(policy=TopBudget(budget=0.5, **FREE))
    observation = observe(site(0, snr=0.2), site(1, snr=0.1))
    present = tuple(s.plan for s in observation.sites)
    first = ask(policy, observation)
    assert (first.action, plan_of(first), first.value["reset"]) == ("apply", present, ["1.q"])
    assert first.value["jaccard"] == 1.0
    assert first.reason.startswith("plan unchanged, 1 linears restart; pooled z 9.0")
    # as if 0.q alone trained since: the same map changes nothing, the opposite one both
    second = ask(policy, observation, first.state)
    assert (second.action, plan_of(second), second.value["reset"]) == ("hold", present, [])
    swapped = observe(site(0, snr=0.1), site(1, snr=0.2))
    third = ask(policy, swapped, second.state)
    assert (third.action, plan_of(third), third.value["reset"]) == (
        "apply",
        present,
        ["0.q", "1.q"],
    )


def test_switch_only_of_step_sizes_restarts_nothing(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(SwitchOnly(policy=SignalShrink()), observe(site(0, snr=0.2), site(1, snr=0.1)))
    assert (decision.action, decision.value["reset"]) == ("apply", [])


# -- Shuffled ------------------------------------------------------------------------------------


def test_shuffled_moves_every_map_within_its_kind_and_keeps_the_order(
    site: Any, observe: Any, ask: Any
) -> None:
    sites = [
        *(site(i, "q", snr=0.1 * (i + 1), z=3.0 + i) for i in range(5)),
        *(site(i, "up", snr=1.0 + i, z=13.0 + i, d_out=20) for i in range(4)),
        site(4, "up", snr=9.0, z=19.0, d_out=30),  # the only one of its shape
        site(5, "q", snr=7.0, can_train=False, state="OFF"),
    ]
    policy = Shuffled(policy=SignalShrink())
    first = ask(policy, observe(*sites))
    source = first.state["source"]
    assert set(source) == {s.plan.key for s in sites if s.can_train}
    assert sorted(source.values()) == sorted(source)
    assert [key for key, other in source.items() if key == other] == ["4.up"]
    assert all(key.split(".")[1] == other.split(".")[1] for key, other in source.items())
    snr = {s.plan.key: s.signals["snr"] for s in sites}
    for s, score in zip(sites, first.scores, strict=True):
        assert score == (pytest.approx(snr[source[s.plan.key]]) if s.can_train else None)
    again = ask(policy, observe(*sites, rollout=50), first.state)
    assert again.state["source"] == source


def test_shuffled_shows_z_with_its_signal(site: Any, observe: Any, ask: Any, plan_of: Any) -> None:
    # of two linears each sees the other's
    sites = [site(0, snr=0.1, z=5.0), site(1, snr=0.4, z=5.0)]
    plain, shuffled = (
        [e.lr_scale for e in plan_of(ask(policy, observe(*sites)))]
        for policy in (SignalShrink(), Shuffled(policy=SignalShrink()))
    )
    assert shuffled == plain[::-1]
    three = [*sites, site(2, snr=0.2, z=0.0)]
    decision = ask(Shuffled(policy=SignalShrink()), observe(*three))
    source = decision.state["source"]
    [unsure] = [key for key, other in source.items() if other == "2.q"]
    [scale] = [e.lr_scale for e in plan_of(decision) if e.key == unsure]
    assert scale == 1.0


def test_shuffled_orders_differ_between_seeds(site: Any, observe: Any) -> None:
    observation = observe(*(site(i, debiased=1.0) for i in range(8)))
    orders = {
        tuple(
            make(Shuffled(policy=Depth()), observation, {}, (seed, 1, 1)).state["source"].values()
        )
        for seed in range(20)
    }
    assert len(orders) > 15
