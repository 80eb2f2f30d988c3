"""Recomputes every decision of a run: ``python -m tropism.adaptation.replay RUN``.

For each row of ``records/decisions.jsonl``, in order: the policy is rebuilt and asked again with
the recorded observation, state and random key, and its answer must be the recorded one, every float
included. The digest in the decision must be that of what was recorded as its inputs, the policy's
settings among them (in runs of earlier versions it did not cover those), and the state must be the
one that the last decision of that kind left. Rows with the status ``rolled back`` are the guard's
work: they must repeat the decision that they take back, and leave the policy's state.

Prints a line for each row; exits 1 on any difference. Loads no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tropism.adaptation.contracts import input_digest
from tropism.adaptation.decide import (
    decision_to_json,
    make,
    observation_from_json,
    plain,
    policy_from_json,
    random_key,
)
from tropism.measurements.records import read

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Args:
        rollout: Of the row.
        kind: ``placement``, ``rewards`` or ``rollouts``.
        policy: Class name, wrapped policies in parentheses.
        status: applied, held or rolled back.
        reason: The policy's, or the guard's.
        difference: The first field that differs and how; None where all is the same.
    """

    rollout: int
    kind: str
    policy: str
    status: str
    reason: str
    difference: str | None

    def __str__(self) -> str:
        verdict = "same" if self.difference is None else f"DIFFERS in {self.difference}"
        where = f"rollout {self.rollout} {self.kind} {self.policy} {self.status}"
        return f"{where}: {self.reason} [{verdict}]"


def replay(run_folder: str | Path) -> Iterator[Outcome]:
    """Recompute the decisions of a run, in the order in which they were made.

    Raises:
        ValueError: The table cannot be read.
    """
    last: dict[str, Row] = {}  # kind -> its last row that was a decision
    applied: dict[str, Row] = {}  # kind -> the last such row that was applied
    for row in read(run_folder, "decisions").to_dict("records"):
        kind = row["kind"]
        if row["status"] == "rolled back":
            difference = _rollback_difference(row, last.get(kind), applied.get(kind))
        else:
            difference = _decision_difference(row, last.get(kind))
            last[kind] = row
            if row["status"] == "applied":
                applied[kind] = row
        yield Outcome(
            rollout=row["rollout"],
            kind=kind,
            policy=_policy_name(row["policy"]),
            status=row["status"],
            reason=row["decision"]["reason"],
            difference=difference,
        )


def _decision_difference(row: Row, previous: Row | None) -> str | None:
    """The first field in which the row is not what recomputing it gives."""
    decision, content = row["decision"], row["observation"]
    if difference := _state_difference(row, previous):
        return difference
    try:
        policy = policy_from_json(row["policy"])
        observation = observation_from_json(row["kind"], content)
        key = tuple(row["rng"])
        expected = random_key(key[0], row["kind"], observation.rollout) if key else ()
        where = {name: content[name] for name in ("rollout", "step")}
        if difference := (
            first_difference({name: row[name] for name in where}, where, "")
            or first_difference(list(key), list(expected) or None, "rng")
        ):
            return difference
        inputs = (content, row["state_before"], key)
        if decision["inputs"] not in (input_digest(p, *inputs) for p in (row["policy"], None)):
            return "decision.inputs: it is not of this policy, observation, state_before and rng"
        again = decision_to_json(make(policy, observation, row["state_before"], key))
        again["inputs"] = decision["inputs"]
    except (KeyError, TypeError, ValueError) as error:
        return f"policy, observation or state_before, which cannot be used: {error}"
    status = {"apply": "applied", "hold": "held"}[again["action"]]
    return first_difference(decision, plain(again), "decision") or first_difference(
        row["status"], status, "status"
    )


def _state_difference(row: Row, previous: Row | None) -> str | None:
    """A state must be the one that the previous decision left.

    Without a previous one any will do (a run may start from another one's checkpoint), and a
    policy that a resumed run changed may start afresh.
    """
    if previous is None:
        return None
    is_new = row["policy"] != previous["policy"]
    if is_new and row["state_before"] == {}:
        return None
    return first_difference(row["state_before"], previous["decision"]["state"], "state_before")


def _rollback_difference(row: Row, previous: Row | None, applied: Row | None) -> str | None:
    """A rollback repeats the decision that it takes back, but for the reason."""
    if previous is None or applied is None:
        return "status: nothing was applied that could be rolled back"
    repeated = {**applied["decision"], "reason": row["decision"]["reason"]}
    return (
        first_difference(row["state_before"], previous["decision"]["state"], "state_before")
        or first_difference(row["policy"], applied["policy"], "policy")
        or first_difference(row["decision"], repeated, "decision")
    )


def first_difference(recorded: Any, expected: Any, path: str) -> str | None:
    """Where two JSON values first differ, and how; None where they are equal to the last bit."""
    if isinstance(recorded, Mapping) and isinstance(expected, Mapping):
        for name in [*expected, *(name for name in recorded if name not in expected)]:
            inner = f"{path}.{name}" if path else str(name)
            if name not in recorded or name not in expected:
                there = "recorded" if name in recorded else "recomputed"
                return f"{inner}: {there} alone has it"
            if difference := first_difference(recorded[name], expected[name], inner):
                return difference
        return None
    if isinstance(recorded, list) and isinstance(expected, list):
        if len(recorded) != len(expected):
            return f"{path}: {len(recorded)} entries recorded, {len(expected)} recomputed"
        differences = (
            first_difference(one, other, f"{path}[{i}]")
            for i, (one, other) in enumerate(zip(recorded, expected, strict=True))
        )
        return next((difference for difference in differences if difference), None)
    texts = json.dumps(recorded), json.dumps(expected)
    return None if texts[0] == texts[1] else f"{path}: recorded {texts[0]}, recomputed {texts[1]}"


def _policy_name(content: Row) -> str:
    name: str = content["class_path"].rpartition(".")[2]
    inner = [
        _policy_name(value)
        for value in content["init_args"].values()
        if isinstance(value, Mapping) and "class_path" in value
    ]
    return f"{name}({', '.join(inner)})" if inner else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tropism.adaptation.replay",
        description="Recompute every decision of a run from its records.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, runs/loop/version_0")
    run: Path = parser.parse_args(arguments).run
    if not run.is_dir():
        parser.error(f"{run} is no folder: give a run folder, such as runs/loop/version_0.")
    num_rows = num_different = 0
    for outcome in replay(run):
        print(outcome)
        num_rows += 1
        num_different += outcome.difference is not None
    if num_rows == 0:
        print(f"{run}: no decisions were recorded.")
    else:
        print(f"{run}: {num_rows} rows, {num_different} differ.")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
