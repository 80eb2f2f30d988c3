"""Uniform and Static."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tropism.adaptation.placement import Static, Uniform


def test_uniform_trains_what_can_and_then_holds(
    site: Any, observe: Any, ask: Any, plan_of: Any, with_plan: Any
) -> None:
    sites = [
        site(0, state="OFF"),
        site(1, state="KEEP"),
        site(2, lr_scale=0.5),
        site(3, state="OFF", can_train=False),
    ]
    observation = observe(*sites, probes=0, z=None)
    decision = ask(Uniform(), observation)
    assert decision.action == "apply"
    assert [(e.state, e.rank, e.lr_scale) for e in plan_of(decision)] == [
        ("TRAIN", 4, 1.0),
        ("TRAIN", 4, 1.0),
        ("TRAIN", 4, 1.0),
        ("OFF", 0, 1.0),
    ]
    assert decision.value["jaccard"] == pytest.approx(1 / 3)
    assert decision.reason == "all 3 linears train at rank 4"
    again = ask(Uniform(), with_plan(observation, decision), decision.state)
    assert again.action == "hold"
    assert plan_of(again) == plan_of(decision)


def test_a_plan_in_force_is_held(site: Any, observe: Any, ask: Any) -> None:
    decision = ask(Uniform(), observe(site(0), site(1)))
    assert (decision.action, decision.reason) == (
        "hold",
        "all 2 linears train at rank 4; in force already",
    )


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({"modules": ("q",)}, ["0.q", "1.q", "2.q", "3.q"]),
        ({"layers": (1, 3)}, ["1.q", "1.v", "3.q", "3.v"]),
        ({"modules": ("v",), "layers": (2,)}, ["2.v"]),
        ({"layers": "bottom_third"}, ["0.q", "0.v", "1.q", "1.v"]),
        ({"layers": "middle_third"}, ["2.q", "2.v"]),
        ({"layers": "top_third"}, ["3.q", "3.v"]),
        ({"sites": ("2.v", "0.q")}, ["0.q", "2.v"]),
        ({"sites": ("2.q", "0.q"), "modules": ("q",)}, ["0.q", "2.q"]),
    ],
)
def test_static_choices(
    site: Any, observe: Any, ask: Any, trained: Any, settings: dict[str, Any], keys: list[str]
) -> None:
    # 4 layers: 0 and 1 lie below 4/3, 2 between 4/3 and 8/3, 3 above
    sites = [site(layer, module) for layer in range(4) for module in "qv"]
    assert trained(ask(Static(**settings), observe(*sites))) == keys


def test_sites_from_a_file(tmp_path: Path, site: Any, observe: Any, ask: Any, trained: Any) -> None:
    (tmp_path / "sites.txt").write_text("1.q\n\n0.q\n")
    policy = Static(sites=str(tmp_path / "sites.txt"))
    assert trained(ask(policy, observe(site(0), site(1), site(2)))) == ["0.q", "1.q"]


def test_thirds_of_thirty_layers_are_ten_each(
    site: Any, observe: Any, ask: Any, trained: Any
) -> None:
    observation = observe(*(site(layer) for layer in range(30)))
    for i, third in enumerate(("bottom_third", "middle_third", "top_third")):
        keys = trained(ask(Static(layers=third), observation))  # type: ignore[arg-type]
        assert keys == [f"{layer}.q" for layer in range(10 * i, 10 * i + 10)]


def test_what_trained_is_kept_and_what_did_not_is_off(
    site: Any, observe: Any, ask: Any, plan_of: Any
) -> None:
    sites = [site(0), site(1), site(2, state="OFF"), site(3, state="KEEP")]
    policy = Static(layers=(0,), rank=2)
    states = [e.state for e in plan_of(ask(policy, observe(*sites)))]
    assert states == ["TRAIN", "KEEP", "OFF", "KEEP"]
    states = [e.state for e in plan_of(ask(policy, observe(*sites, step=0)))]
    assert states == ["TRAIN", "OFF", "OFF", "KEEP"]
    assert plan_of(ask(policy, observe(*sites)))[0].rank == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ("q", "up")}, r"Static\.modules: \['up'\] match no linear .*\['q'\]"),
        ({"layers": (0, 9)}, r"Static\.layers: \[9\] match no linear with an adapter .*\[0, 1\]"),
        ({"layers": (2,)}, r"Static\.layers: \[2\]"),
        ({"sites": ("0.q", "0.up")}, r"Static\.sites: \['0\.up'\].*\['0\.q', '1\.q'\]"),
        ({"rank": 5}, r"rank=5: the adapters have 4 components; give at most"),
    ],
)
def test_static_refuses_what_matches_nothing(
    site: Any, observe: Any, ask: Any, settings: dict[str, Any], message: str
) -> None:
    observation = observe(site(0), site(1), site(2, can_train=False, state="OFF"))
    with pytest.raises(ValueError, match=message):
        ask(Static(**settings), observation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ()}, r"Static\.modules=\(\): name some"),
        ({"layers": ()}, r"Static\.layers=\(\): name some"),
        ({"sites": ()}, r"Static\.sites=\(\): name some"),
        ({"sites": "no.txt"}, r"Static\.sites='no\.txt': there is no such file"),
        ({"layers": "top"}, r"Static\.layers='top': give indices or one of \('bottom_third'"),
        ({"rank": 0}, r"Static\.rank=0: give 1 or more"),
    ],
)
def test_static_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Static(**settings)
