"""Replay of plans: reading a run, its two modes, what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tropism.adaptation.placement import Replay
from tropism.lora.plan import SitePlan
from tropism.measurements.records import TABLES, RecordTable

Rows = Sequence[tuple[int, Sequence[SitePlan]]]


def write(folder: Path, plans: Rows) -> Path:
    table = RecordTable(folder, "plans")
    for rollout, plan in plans:
        rows = [{"policy": "Depth", **asdict(entry), "score": None} for entry in plan]
        table.append(rows, rollout=rollout, step=rollout)
    return folder


def entry(layer: int | None, state: str, rank: int = 4, lr_scale: float = 1.0) -> SitePlan:
    rank = rank if state == "TRAIN" else 0
    return SitePlan(layer, "q", state, rank, lr_scale)  # type: ignore[arg-type]


PLANS: Rows = [
    (0, [entry(0, "TRAIN"), entry(1, "TRAIN"), entry(None, "TRAIN")]),
    (0, [entry(0, "TRAIN", 2), entry(1, "TRAIN"), entry(None, "TRAIN")]),
    (20, [entry(0, "KEEP"), entry(1, "TRAIN", 3, 0.3), entry(None, "TRAIN")]),
    (40, [entry(0, "TRAIN"), entry(1, "KEEP"), entry(None, "KEEP")]),
]


def present(site: Any) -> list[Any]:
    return [site(0), site(1), site(None)]


@pytest.mark.parametrize("name", [".", "records/plans.jsonl"])
def test_final_plan_from_the_start(
    tmp_path: Path, site: Any, observe: Any, ask: Any, plan_of: Any, with_plan: Any, name: str
) -> None:
    policy = Replay(plans=str(write(tmp_path, PLANS) / name))
    observation = observe(*present(site), rollout=0, step=0, probes=0, z=None)
    decision = ask(policy, observation)
    # what never trained is off, where the other run had kept it
    assert plan_of(decision) == (entry(0, "TRAIN"), entry(1, "OFF"), entry(None, "OFF"))
    assert decision.reason.startswith("plan 3 of 3, of rollout 40 in ")
    assert ask(policy, with_plan(observation, decision), decision.state).action == "hold"


def test_schedule(
    tmp_path: Path, site: Any, observe: Any, ask: Any, plan_of: Any, with_plan: Any
) -> None:
    policy = Replay(plans=str(write(tmp_path, PLANS)), mode="schedule")
    state: dict[str, Any] = {}
    found = {}
    sites = present(site)
    for rollout in (0, 10, 20, 30, 45):
        observation = observe(*sites, rollout=rollout, step=rollout + 1)
        decision = ask(policy, observation, state)
        sites, state = list(with_plan(observation, decision).sites), dict(decision.state)
        found[rollout] = (decision.action, plan_of(decision))
    assert {rollout: action for rollout, (action, _) in found.items()} == {
        0: "apply",
        10: "hold",
        20: "apply",
        30: "hold",
        45: "apply",
    }
    assert [found[rollout][1] for rollout in (0, 20, 45)] == [tuple(plan) for _, plan in PLANS[1:]]


def test_schedule_before_its_first_plan(tmp_path: Path, site: Any, observe: Any, ask: Any) -> None:
    policy = Replay(plans=str(write(tmp_path, PLANS[2:])), mode="schedule")
    assert ask(policy, observe(*present(site), rollout=19)).action == "hold"
    assert ask(policy, observe(*present(site), rollout=20)).action == "apply"


def took_steps(folder: Path, num_rollouts: int) -> None:
    row = dict.fromkeys(TABLES["steps"])
    for rollout in range(num_rollouts):
        RecordTable(folder, "steps").append([row], rollout=rollout, step=rollout)


def test_average_of_step_sizes_by_hand(
    tmp_path: Path, site: Any, observe: Any, ask: Any, plan_of: Any, with_plan: Any
) -> None:
    # In force in rollouts 0 to 20, 21 to 40 and 41 to 59; the last plan never was.
    plans: Rows = [
        (0, [entry(0, "TRAIN"), entry(1, "TRAIN"), entry(None, "OFF")]),
        (20, [entry(0, "TRAIN", lr_scale=2.0), entry(1, "KEEP"), entry(None, "OFF")]),
        (40, [entry(0, "TRAIN", lr_scale=0.5), entry(1, "TRAIN", 4, 3.0), entry(None, "OFF")]),
        (59, [entry(0, "KEEP"), entry(1, "TRAIN", 2, 9.0), entry(None, "OFF")]),
    ]
    took_steps(write(tmp_path, plans), 60)
    policy = Replay(plans=str(tmp_path), mode="average")
    observation = observe(*present(site), rollout=0, step=0, probes=0, z=None)
    decision = ask(policy, observation)
    assert decision.reason.startswith("plan 1 of 1, average in ")
    first, second, third = plan_of(decision)
    assert (first.state, first.rank, second.state, second.rank) == ("TRAIN", 4, "TRAIN", 4)
    assert first.lr_scale == pytest.approx(((21 * 1 + 20 * 4 + 19 * 0.25) / 60) ** 0.5)
    assert second.lr_scale == pytest.approx(((21 * 1 + 19 * 9) / 60) ** 0.5)
    assert third == entry(None, "OFF")
    assert ask(policy, with_plan(observation, decision), decision.state).action == "hold"


def test_what_has_no_average_is_named(tmp_path: Path) -> None:
    write(tmp_path, PLANS)
    with pytest.raises(ValueError, match=r"Replay\.plans=.*: no steps are recorded there"):
        Replay(plans=str(tmp_path), mode="average")
    took_steps(tmp_path, 60)
    with pytest.raises(ValueError, match=r"0\.q trained at the ranks \[2, 4\], of which there"):
        Replay(plans=str(tmp_path), mode="average")


def test_shuffled_plans_keep_their_order_of_linears(
    tmp_path: Path, site: Any, observe: Any, ask: Any, plan_of: Any, with_plan: Any
) -> None:
    count = 6

    def plan(scales: Sequence[float]) -> list[SitePlan]:
        return [
            *(entry(i, "TRAIN", lr_scale=scale) for i, scale in enumerate(scales)),
            SitePlan(0, "up", "TRAIN", 3, 0.7),
        ]

    scales = [
        [1.0] * count,
        [0.1 * (i + 1) for i in range(count)],
        [2.0 - 0.1 * i for i in range(6)],
    ]
    write(tmp_path, [(20 * i, plan(each)) for i, each in enumerate(scales)])
    policy = Replay(plans=str(tmp_path), mode="schedule", should_shuffle=True)
    sites = [*(site(i) for i in range(count)), site(0, "up", d_out=7)]
    state: dict[str, Any] = {}
    found = []
    for rollout in (0, 10, 20, 40):
        decision = ask(policy, observe(*sites, rollout=rollout), state)
        sites = list(with_plan(observe(*sites, rollout=rollout), decision).sites)
        state = dict(decision.state)
        found.append(plan_of(decision))
    assert [e.key for e in found[-1]] == [s.plan.key for s in sites]
    assert all(e[-1] == SitePlan(0, "up", "TRAIN", 3, 0.7) for e in found)  # alone of its kind
    got = [[e.lr_scale for e in plan[:-1]] for plan in found]
    assert got[:2] == [scales[0]] * 2
    order = [scales[1].index(scale) for scale in got[2]]
    assert sorted(order) == list(range(count))  # as much update in all
    assert all(i != place for place, i in enumerate(order))  # and nobody's own
    assert [scales[2].index(scale) for scale in got[3]] == order
    assert decision.reason.endswith(", shuffled")


def test_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Replay\.plans=.*plans\.jsonl does not exist; give"):
        Replay(plans=str(tmp_path))
    write(tmp_path, PLANS[:1])
    (tmp_path / "records" / "plans.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"plans\.jsonl is empty"):
        Replay(plans=str(tmp_path))
    with pytest.raises(ValueError, match=r"Replay\.mode='last': choose final, schedule or average"):
        Replay(plans=str(tmp_path), mode="last")  # type: ignore[arg-type]


def test_plans_of_another_model_are_refused(
    tmp_path: Path, site: Any, observe: Any, ask: Any
) -> None:
    policy = Replay(plans=str(write(tmp_path, PLANS[:1])))
    with pytest.raises(ValueError, match=r"Replay\.plans=.*: 2\.q and 1 more linears are in one"):
        ask(policy, observe(site(0), site(1), site(2)))
    without = [site(0, can_train=False, state="OFF"), site(1), site(None)]
    with pytest.raises(ValueError, match=r"0\.q trains at rank 4 there and has no adapter here"):
        ask(policy, observe(*without))
    tall = write(
        tmp_path / "tall", [(0, [entry(0, "TRAIN", 16), entry(1, "OFF"), entry(None, "OFF")])]
    )
    with pytest.raises(ValueError, match=r"0\.q trains at rank 16 there and at most 4 here"):
        ask(Replay(plans=str(tall)), observe(*present(site)))
