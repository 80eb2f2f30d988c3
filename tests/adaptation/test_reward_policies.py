"""Fixed, GDPO, GradientShare, SaturationDecay, SAW: weights by hand, caps, what makes them hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tropism.adaptation.rewards import GDPO, SAW, Fixed, GradientShare, SaturationDecay

FREE: dict[str, Any] = {"max_step": 100.0, "min_factor": 0.01, "smoothing": 0.0, "tolerance": 0.0}


def weights(decision: Any) -> dict[str, float]:
    return dict(decision.value["weights"])


@pytest.mark.parametrize("policy", [Fixed(), GDPO()])
def test_fixed_ones_hold(component: Any, rewards: Any, ask: Any, policy: Any) -> None:
    decision = ask(policy, rewards(component("accuracy"), component("format", 0.5)))
    assert (decision.action, weights(decision)) == ("hold", {"accuracy": 1.0, "format": 0.5})


def test_gdpo_needs_its_aggregation() -> None:
    GDPO().check_objective("normalize_then_sum")
    with pytest.raises(
        ValueError, match=r"objective\.aggregation='sum_then_normalize' with .*GDPO"
    ):
        GDPO().check_objective("sum_then_normalize")


# -- GradientShare -------------------------------------------------------------------------------


def test_share_is_restored_by_one_factor(component: Any, rewards: Any, ask: Any) -> None:
    # energies 1 (outcome), 0.25 * 8 = 2 and 1: others may have 1 of their 3
    observation = rewards(
        component("accuracy", 1.0, norm=1.0),
        component("format", 0.5, norm=8.0),
        component("brevity", -1.0, norm=1.0),
    )
    decision = ask(GradientShare(target=0.5, **FREE), observation)
    c = math.sqrt(1 / 3)
    assert weights(decision) == pytest.approx({"accuracy": 1.0, "format": 0.5 * c, "brevity": -c})
    assert decision.value["shares"] == pytest.approx(
        {"accuracy": 0.25, "format": 0.5, "brevity": 0.25}
    )
    assert decision.reason == (
        "accuracy has 25% of the update energy, target 50%: others' weights give it 50%"
    )


def test_steps_are_bounded_and_reversed(component: Any, rewards: Any, ask: Any) -> None:
    policy = GradientShare(target=0.5, max_step=1.5, min_factor=0.1, smoothing=0.0, tolerance=0.05)
    weight, seen = 1.0, []
    for norm in (3.0, 3.0, 3.0, 0.9, 0.9, 0.9, 0.9):
        format_ = component("format", weight, initial=1.0, norm=norm)
        decision = ask(policy, rewards(component("accuracy", norm=1.0), format_))
        weight = weights(decision)["format"]
        seen.append((decision.action, weight))
    # 1 / sqrt(3) = 0.577 in two steps; then back to 1 as the other gradient fades
    expected = [2 / 3, 0.57735, 0.57735, 0.57735 * 1.5, 1.0, 1.0, 1.0]
    assert [w for _, w in seen] == pytest.approx(expected, rel=1e-4)
    assert [a for a, _ in seen] == ["apply", "apply", "hold", "apply", "apply", "hold", "hold"]


def test_where_a_bound_binds_the_others_do_the_rest(component: Any, rewards: Any, ask: Any) -> None:
    # format may go from 1 to 2/3, 4/9 of energy; schema (ratio 0.6, energy 2) then has 5/9
    policy = GradientShare(target=0.5, max_step=1.5, min_factor=0.1, smoothing=0.0)
    observation = rewards(
        component("accuracy", norm=1.0),
        component("format", 1.0, norm=1.0),
        component("schema", 0.6, initial=1.0, norm=2.0),
    )
    expected = {"accuracy": 1.0, "format": 2 / 3, "schema": math.sqrt(5 / 18)}
    assert weights(ask(policy, observation)) == pytest.approx(expected)


def test_floor_can_leave_the_share_short(component: Any, rewards: Any, ask: Any) -> None:
    policy = GradientShare(target=0.5, **{**FREE, "min_factor": 0.5})
    observation = rewards(component("accuracy", norm=1.0), component("format", 1.0, norm=12.0))
    decision = ask(policy, observation)
    assert weights(decision)["format"] == 0.5
    assert decision.reason.endswith("others' weights give it 25%")


def test_norms_are_averaged_and_negative_ones_count_as_zero(
    component: Any, rewards: Any, ask: Any
) -> None:
    policy = GradientShare(target=0.5, smoothing=0.5)
    first = ask(policy, rewards(component("accuracy", norm=4.0), component("format", norm=-3.0)))
    assert first.action == "hold"
    assert first.value["shares"] == {"accuracy": 1.0, "format": 0.0}
    second = ask(
        policy, rewards(component("accuracy", norm=0.0), component("format", norm=5.0)), first.state
    )
    # averages 2 and 1
    assert second.value["shares"] == pytest.approx({"accuracy": 2 / 3, "format": 1 / 3})


@pytest.mark.parametrize(
    ("norm", "probes", "reason"),
    [
        (None, 12, "the gradient of accuracy is undefined or 0"),
        (-1.0, 12, "the gradient of accuracy is undefined or 0"),
        (1.0, 3, "3 probes pooled, 8 are needed"),
    ],
)
def test_undefined_share_holds(
    component: Any, rewards: Any, ask: Any, norm: float | None, probes: int, reason: str
) -> None:
    observation = rewards(component("accuracy", norm=norm), component("format"), probes=probes)
    decision = ask(GradientShare(), observation)
    assert (decision.action, decision.reason) == ("hold", reason)


def test_measured_only_and_undefined_components_stay(
    component: Any, rewards: Any, ask: Any
) -> None:
    observation = rewards(
        component("accuracy", norm=1.0),
        component("format", norm=9.0),
        component("watched", 0.0, norm=50.0),
        component("rare", norm=None),
    )
    after = weights(ask(GradientShare(target=0.5, **FREE), observation))
    assert after == pytest.approx({"accuracy": 1.0, "format": 1 / 3, "watched": 0.0, "rare": 1.0})


def test_unknown_outcome(component: Any, rewards: Any, ask: Any) -> None:
    with pytest.raises(ValueError, match=r"outcome='accuracy' is no reward component; .*'format'"):
        ask(GradientShare(), rewards(component("format")))


positive = st.floats(1e-3, 1e3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    st.lists(st.tuples(positive, st.floats(0.1, 1.0), positive), min_size=1, max_size=6),
    st.floats(0.05, 0.95),
)
def test_gradient_share_keeps_caps_and_reaches_target_where_it_may(
    component: Any,
    rewards: Any,
    ask: Any,
    cases: list[tuple[float, float, float]],
    target: float,
) -> None:
    policy = GradientShare(target=target, max_step=2.0, min_factor=0.1, smoothing=0.0)
    others = [
        component(f"c{i}", initial * ratio, initial=initial, norm=norm)
        for i, (initial, ratio, norm) in enumerate(cases)
    ]
    after = weights(ask(policy, rewards(component("accuracy", norm=1.0), *others)))
    assert after["accuracy"] == 1.0
    for c in others:
        ratio = after[c.name] / c.initial_weight
        assert 0.1 * (1 - 1e-12) <= ratio <= 1 + 1e-12
        assert 0.5 - 1e-12 <= after[c.name] / c.weight <= 2 + 1e-12
    energy = math.fsum(after[c.name] ** 2 * c.gradient_norm_sq for c in others)
    lowest = math.fsum(
        (max(0.1 * c.initial_weight, c.weight / 2)) ** 2 * c.gradient_norm_sq for c in others
    )
    allowed = (1 - target) / target
    assert energy <= max(allowed, lowest) * (1 + 1e-9)


# -- SaturationDecay -----------------------------------------------------------------------------


def test_saturated_components_decay_after_patience_down_to_the_floor(
    component: Any, rewards: Any, ask: Any
) -> None:
    policy = SaturationDecay(threshold=0.9, patience=2, rate=0.5, floor=0.2)
    weight, state, seen = 2.0, {}, []
    for mean in (0.95, 0.95, None, 0.95, 0.95, 0.5, 0.95, 0.95):
        parts = [
            component("accuracy", mean=1.0),
            component("format", weight, initial=2.0, mean=mean),
            component("penalty", -1.0, mean=1.0),
            component("watched", 0.0, mean=1.0),
        ]
        decision = ask(policy, rewards(*parts), state)
        after, state = weights(decision), dict(decision.state)
        assert (after["accuracy"], after["penalty"], after["watched"]) == (1.0, -1.0, 0.0)
        weight = after["format"]
        seen.append(weight)
    # second in a row: 1; None neither counts nor breaks; then 0.5, then the floor of 0.4
    assert seen == pytest.approx([2.0, 1.0, 1.0, 0.5, 0.4, 0.4, 0.4, 0.4])
    assert state == {"streaks": {"format": 2}}


def test_recovery(component: Any, rewards: Any, ask: Any) -> None:
    policy = SaturationDecay(patience=2, rate=0.5, should_recover=True)
    weight, state, seen = 0.4, {}, []
    for _ in range(4):
        parts = [component("accuracy"), component("format", weight, initial=1.0, mean=0.5)]
        decision = ask(policy, rewards(*parts), state)
        weight, state = weights(decision)["format"], dict(decision.state)
        seen.append(weight)
    assert seen == pytest.approx([0.4, 0.8, 1.0, 1.0])
    assert decision.action == "hold"


def test_saturation_reason(component: Any, rewards: Any, ask: Any) -> None:
    policy = SaturationDecay(patience=1)
    decision = ask(policy, rewards(component("accuracy"), component("format", mean=0.99)))
    assert decision.reason == "format 0.99 above 0.95 for 1 decisions, weight 1 to 0.8"


# -- SAW -----------------------------------------------------------------------------------------


def test_weights_follow_the_coefficient_of_variation(
    component: Any, rewards: Any, ask: Any
) -> None:
    # cv 1 and 0.25, sum 2: 1.6 and 0.4
    observation = rewards(
        component("accuracy", mean=0.2, std=0.2), component("format", mean=0.8, std=0.2)
    )
    decision = ask(SAW(smoothing=0.0, max_step=10.0), observation)
    assert weights(decision) == pytest.approx({"accuracy": 1.6, "format": 0.4})
    # a step of at most 1.5: format stops at 2/3, the sum stays 2
    decision = ask(SAW(smoothing=0.0), observation)
    assert weights(decision) == pytest.approx({"accuracy": 4 / 3, "format": 2 / 3})
    assert decision.reason == (
        "coefficient of variation -> weight: accuracy 1.00 -> 1.33, format 0.25 -> 0.667"
    )


def test_outcome_never_falls_below_its_initial_weight(
    component: Any, rewards: Any, ask: Any
) -> None:
    observation = rewards(
        component("accuracy", 1.5, initial=1.0, mean=0.8, std=0.08),
        component("format", 1.0, mean=0.2, std=0.2),
        component("schema", 1.0, mean=0.5, std=0.5),
    )
    # cv 0.1, 1, 1 of a sum of 3.5: the outcome stops at 1, the others share 2.5
    after = weights(ask(SAW(smoothing=0.0, max_step=9.0), observation))
    assert after == pytest.approx({"accuracy": 1.0, "format": 1.25, "schema": 1.25})


def test_saw_averages_and_holds(component: Any, rewards: Any, ask: Any) -> None:
    policy = SAW(smoothing=0.5, max_step=9.0)
    first = ask(
        policy,
        rewards(component("accuracy", mean=0.2, std=0.2), component("format", mean=0.2, std=0.2)),
    )
    assert first.action == "hold"  # equal already
    second = ask(
        policy,
        rewards(component("accuracy", mean=0.2, std=0.4), component("format", mean=0.2, std=0.0)),
        first.state,
    )
    assert weights(second) == pytest.approx({"accuracy": 1.5, "format": 0.5})  # 1.5 and 0.5
    for undefined in ({"mean": 0.0}, {"mean": None}, {"std": None}):
        decision = ask(policy, rewards(component("accuracy"), component("format", **undefined)))
        assert decision.action == "hold"
        assert decision.reason.startswith("1 components have a coefficient of variation")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    st.lists(
        st.tuples(positive, st.floats(0.25, 4.0), st.floats(0.01, 1.0), st.floats(0.01, 0.5)),
        min_size=2,
        max_size=6,
    )
)
def test_saw_keeps_sum_and_caps(
    component: Any, rewards: Any, ask: Any, cases: list[tuple[float, float, float, float]]
) -> None:
    parts = [
        component(
            "accuracy" if i == 0 else f"c{i}",
            initial * (max(1.0, ratio) if i == 0 else ratio),
            initial=initial,
            mean=mean,
            std=std,
        )
        for i, (initial, ratio, mean, std) in enumerate(cases)
    ]
    after = weights(ask(SAW(), rewards(*parts)))
    assert math.fsum(after.values()) == pytest.approx(math.fsum(c.weight for c in parts), rel=1e-9)
    for c in parts:
        ratio = after[c.name] / c.initial_weight
        assert 0.25 * (1 - 1e-9) <= ratio <= 4.0 * (1 + 1e-9)
        assert 1 / 1.5 - 1e-9 <= after[c.name] / c.weight <= 1.5 + 1e-9
    assert after["accuracy"] >= parts[0].initial_weight * (1 - 1e-9)


@pytest.mark.parametrize(
    ("policy", "setting", "value"),
    [
        (GradientShare, "target", 1.0),
        (GradientShare, "max_step", 1.0),
        (GradientShare, "min_factor", 0.0),
        (GradientShare, "tolerance", -0.1),
        (SaturationDecay, "threshold", 1.0),
        (SaturationDecay, "patience", 0),
        (SaturationDecay, "rate", 1.0),
        (SaturationDecay, "floor", 1.1),
        (SAW, "min_factor", 1.1),
        (SAW, "max_factor", 0.9),
        (SAW, "max_step", 1.0),
        (SAW, "smoothing", 1.0),
    ],
)
def test_refused_settings(policy: Any, setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{policy.__name__}\.{setting}={value}: give "):
        policy(**{setting: value})
