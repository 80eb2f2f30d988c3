"""Recomputing recorded decisions: the same to the last bit, and every alteration found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tropism.adaptation import placement as p
from tropism.adaptation import rewards as r
from tropism.adaptation.contracts import Decision, RolloutObservation, input_digest
from tropism.adaptation.decide import (
    decision_to_json,
    make,
    observation_to_json,
    policy_to_json,
    random_key,
)
from tropism.adaptation.replay import first_difference, main, replay
from tropism.adaptation.rollouts import CriticalGroups
from tropism.measurements.records import RecordTable

Row = dict[str, Any]


class Recording:
    """Decisions of a run, written as a run writes them."""

    def __init__(self, folder: Path, kind: str, policy: Any) -> None:
        self.folder, self.kind, self.policy = folder, kind, policy
        self.state: dict[str, Any] = {}

    def ask(self, observation: Any) -> Decision:
        key, before = random_key(11, self.kind, observation.rollout), self.state
        decision = make(self.policy, observation, before, key)
        self.state = dict(decision.state)
        status = {"apply": "applied", "hold": "held"}[decision.action]
        self.write(observation, before, key, decision, status)
        return decision

    def write(
        self, observation: Any, before: Any, key: tuple[int, ...], decision: Decision, status: str
    ) -> None:
        row = {
            "kind": self.kind,
            "policy": policy_to_json(self.policy),
            "observation": observation_to_json(observation),
            "state_before": before,
            "rng": list(key),
            "decision": decision_to_json(decision),
            "status": status,
        }
        table = RecordTable(self.folder, "decisions")
        table.append([row], rollout=observation.rollout, step=observation.step)


def maps(site: Any, observe: Any, *, count: int = 5) -> Iterator[Any]:
    """Readings of a model of 3 layers with 2 linears each; evidence grows."""
    rng = np.random.default_rng(3)
    for i in range(count):
        sites = [
            site(
                layer,
                module,
                z=float(rng.normal(4, 2)),
                d_in=5 if module == "q" else 9,
                snr=float(rng.lognormal(-3)),
                debiased=float(rng.normal(layer, 0.5)),
            )
            for layer in range(3)
            for module in ("q", "up")
        ]
        yield observe(*sites, rollout=20 * i, step=20 * i, z=None if i == 0 else 2.0 + 2 * i)


PLACEMENT = [
    p.Uniform(rank=3),
    p.Static(layers="top_third"),
    p.SignalShrink(),
    p.SignalShrink(only_shrink=True, smoothing=0.7),
    p.TopBudget(budget=0.5),
    p.Depth(dwell=1),
    p.Sensitivity(end_rollout=60),
    p.Rotate(share=0.5),
    p.OneShot(policy=p.TopBudget(), after_rollouts=30),
    p.SwitchOnly(policy=p.TopBudget(dwell=1)),
    p.Shuffled(policy=p.SignalShrink()),
]


@pytest.mark.parametrize("policy", PLACEMENT, ids=lambda policy: type(policy).__name__)
def test_placement_is_the_same(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    site: Any,
    observe: Any,
    with_plan: Any,
    policy: Any,
) -> None:
    run = Recording(tmp_path, "placement", policy)
    plan = None
    for observation in maps(site, observe):
        now = observation
        if plan is not None:
            sites = [replace(s, plan=e.plan) for s, e in zip(now.sites, plan.sites, strict=True)]
            now = replace(now, sites=tuple(sites))
        plan = with_plan(now, run.ask(now))
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("[same]") for line in lines[:-1])
    assert lines[-1] == f"{tmp_path}: 5 rows, 0 differ."
    assert any(" applied: " in line for line in lines)


@pytest.fixture
def recorded(tmp_path: Path, site: Any, observe: Any, component: Any, rewards: Any) -> Path:
    """A run with all three kinds, and a rollback."""
    run = Recording(tmp_path, "placement", p.Shuffled(policy=p.SignalShrink()))
    weights = Recording(tmp_path, "rewards", r.GradientShare())
    groups = Recording(tmp_path, "rollouts", CriticalGroups(group_sizes=(4, 8)))
    for i, observation in enumerate(maps(site, observe, count=4)):
        decision = run.ask(replace(observation, num_rollbacks=int(i == 3)))
        weights.ask(
            replace(
                rewards(component("accuracy", norm=1.0), component("format", norm=2.0 + i)),
                rollout=20 * i,
            )
        )
        groups.ask(RolloutObservation(20 * i, 20 * i, 12, 8, 8, 10.0 + 3 * i, 0.25))
        if i == 2:
            assert decision.action == "apply"
            back = replace(decision, reason="KL 0.3 above 0.2")
            run.write(replace(observation, rollout=47), run.state, (), back, "rolled back")
    return tmp_path


def rows_of(folder: Path) -> list[Row]:
    lines = (folder / "records" / "decisions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rewrite(folder: Path, rows: list[Row]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "records" / "decisions.jsonl").write_text(text)


def test_all_kinds_and_a_rollback_are_the_same(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recorded)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{recorded}: 13 rows, 0 differ."
    assert lines[0] == (
        "rollout 0 placement Shuffled(SignalShrink) held: shuffled map; pooled z undefined over 12 "
        "probes [same]"
    )
    assert "the guard took a switch back: decision 1 of 2 [same]" in lines[10]
    assert (
        "rollout 47 placement Shuffled(SignalShrink) rolled back: KL 0.3 above 0.2 [same]" in lines
    )


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values that are not containers."""
    if isinstance(content, dict):
        for name, item in content.items():
            yield from leaves(item, (*path, name))
    elif isinstance(content, list):
        for i, item in enumerate(content):
            yield from leaves(item, (*path, i))
    else:
        yield path


def altered(value: Any) -> Any:
    """Another value of the same kind, as near as it gets."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return float(np.nextafter(value, np.inf))
    if isinstance(value, int):
        return value + 1
    return "other" if isinstance(value, str) else 0.5


@pytest.mark.parametrize("column", ["policy", "observation", "state_before", "rng", "decision"])
def test_altering_any_recorded_value_is_found(recorded: Path, column: str) -> None:
    rows = rows_of(recorded)
    # A rollback's own observation is what the guard saw; nothing is decided on it. Its reason, too.
    decisions = [i for i, row in enumerate(rows) if row["status"] != "rolled back"]
    missed, num_tried = [], 0
    for i in decisions[3:9]:
        for path in leaves(rows[i][column]):
            changed = json.loads(json.dumps(rows))
            place = changed[i][column]
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = altered(place[path[-1]])
            rewrite(recorded, changed)
            num_tried += 1
            if all(outcome.difference is None for outcome in replay(recorded)):
                missed.append((i, path))
    assert num_tried >= 18
    assert missed == []


def test_the_report_names_rollout_and_field(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(recorded)
    rows[6]["observation"]["sites"][1]["signals"]["snr"] *= 1.0000001
    rewrite(recorded, rows)
    assert main([str(recorded)]) == 1
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "DIFFERS" in line]
    assert line.startswith("rollout 40 placement ")
    assert "decision.inputs: it is not of this policy, observation, state_before and rng" in line
    assert lines[-1].endswith("13 rows, 1 differ.")


def test_runs_of_earlier_versions_replay(recorded: Path) -> None:
    """Their digests left out the policy, and they knew no rollbacks."""
    rows = rows_of(recorded)[:9]
    for row in rows:
        row["observation"].pop("num_rollbacks", None)
        if row["kind"] == "placement":
            row["policy"]["init_args"]["policy"]["init_args"].pop("cooldown")
            assert "cooldown" not in row["decision"]["state"]["policy"]
        inputs = (row["observation"], row["state_before"], tuple(row["rng"]))
        row["decision"]["inputs"] = input_digest(None, *inputs)
    rewrite(recorded, rows)
    assert [o for o in replay(recorded) if o.difference is not None] == []


def test_a_setting_that_changes_no_answer_is_noticed(recorded: Path) -> None:
    rows = rows_of(recorded)
    settings = rows[0]["policy"]["init_args"]["policy"]["init_args"]
    assert rows[0]["status"] == "held"
    settings["high"] = 2.5
    rewrite(recorded, rows)
    [difference] = [o.difference for o in replay(recorded) if o.rollout == 0 and o.difference]
    assert difference.startswith("decision.inputs: it is not of this policy, ")


def test_a_consistent_forgery_of_the_digest_is_found_by_recomputing(recorded: Path) -> None:
    rows = rows_of(recorded)
    plan = rows[6]["decision"]["value"]["plan"]
    plan[0]["lr_scale"] = float(np.nextafter(plan[0]["lr_scale"], 9))
    rewrite(recorded, rows)
    found = [(o.rollout, o.difference) for o in replay(recorded) if o.difference is not None]
    assert found[0][0] == 40
    assert found[0][1] is not None
    assert found[0][1].startswith("decision.value.plan[0].lr_scale: recorded ")
    # and the rollback no longer repeats it
    assert found[1][0] == 47


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda row: row.update(status="held"), "status"),
        (lambda row: row.update(rollout=41), "rollout"),
        (
            lambda row: row["policy"]["init_args"]["policy"]["init_args"].update(high=1.1),
            "decision",
        ),
        (
            lambda row: row["policy"].update(class_path="tropism.adaptation.placement.Gone"),
            "policy",
        ),
        (lambda row: row["observation"].pop("sites"), "policy, observation"),
        (lambda row: row["decision"].update(extra=1), "decision.extra"),
    ],
)
def test_other_alterations(recorded: Path, change: Callable[[Row], Any], field: str) -> None:
    rows = rows_of(recorded)
    change(rows[6])
    rewrite(recorded, rows)
    first = next(o for o in replay(recorded) if o.difference is not None)
    assert first.difference is not None
    assert first.difference.startswith(field)


def test_a_missing_row_breaks_the_chain(recorded: Path) -> None:
    rows = rows_of(recorded)
    del rows[3]
    rewrite(recorded, rows)
    [first, *_] = [o for o in replay(recorded) if o.difference is not None]
    assert (first.rollout, first.kind) == (40, "placement")
    assert (first.difference or "").startswith("state_before.")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda row: row["decision"]["value"].update(jaccard=0.1), "decision.value.jaccard"),
        (lambda row: row.update(state_before={}), "state_before"),
        (lambda row: row["policy"]["init_args"].update(policy=None), "policy"),
    ],
)
def test_a_rollback_repeats_what_it_takes_back(
    recorded: Path, change: Callable[[Row], Any], field: str
) -> None:
    rows = rows_of(recorded)
    [index] = [i for i, row in enumerate(rows) if row["status"] == "rolled back"]
    change(rows[index])
    rewrite(recorded, rows)
    [outcome] = [o for o in replay(recorded) if o.difference is not None]
    assert (outcome.rollout, outcome.status) == (47, "rolled back")
    assert (outcome.difference or "").startswith(field)
    rewrite(recorded, [rows_of(recorded)[index]])
    [alone] = replay(recorded)
    assert alone.difference == "status: nothing was applied that could be rolled back"


def test_a_resumed_run_may_go_on_or_change_its_policy(
    tmp_path: Path, site: Any, observe: Any
) -> None:
    before = Recording(tmp_path / "first", "placement", p.SignalShrink())
    readings = list(maps(site, observe))
    for observation in readings[:2]:
        before.ask(observation)
    resumed = Recording(tmp_path / "resumed", "placement", p.SignalShrink())
    resumed.state = before.state  # from a checkpoint, into another folder
    resumed.ask(readings[2])
    changed = Recording(tmp_path / "resumed", "placement", p.Depth())
    changed.ask(readings[3])
    assert [o.difference for o in replay(tmp_path / "resumed")] == [None, None]


def test_no_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: no decisions were recorded.\n"
    with pytest.raises(SystemExit) as exit_:
        main([str(tmp_path / "nowhere")])
    assert exit_.value.code == 2
    assert "nowhere is no folder: give a run folder" in capsys.readouterr().err


def test_command_runs_and_loads_no_torch(recorded: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['replay', sys.argv[1]]\n"
        "try: runpy.run_module('tropism.adaptation.replay', run_name='__main__')\n"
        "except SystemExit as end: print('exit', end.code, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(recorded)], capture_output=True, text=True, check=False
    )
    assert result.stdout.splitlines()[-1] == "exit 0 False", result.stdout + result.stderr


def test_first_difference() -> None:
    same = {"a": [1, {"b": 0.1}], "c": None}
    assert first_difference(same, json.loads(json.dumps(same)), "") is None
    cases = [
        ({"a": 1}, {"a": 1.0}, "a: recorded 1, recomputed 1.0"),
        ({"a": True}, {"a": 1}, "a: recorded true, recomputed 1"),
        ({"a": [1, 2]}, {"a": [1]}, "a: 2 entries recorded, 1 recomputed"),
        ({"a": 1, "b": 2}, {"a": 1}, "b: recorded alone has it"),
        ({"a": 1}, {"a": 1, "b": 2}, "b: recomputed alone has it"),
        ({"a": {"b": [0.1]}}, {"a": {"b": [0.2]}}, "a.b[0]: recorded 0.1, recomputed 0.2"),
        ({"a": {}}, {"a": []}, "a: recorded {}, recomputed []"),
    ]
    for recorded, expected, difference in cases:
        assert first_difference(recorded, expected, "") == difference
