"""What the figures of a tracing are drawn from: averages over known facts, in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from paper_figures import tracing
from paper_figures.sources import MissingDataError

from tropism.measurements.records import RecordTable


def write(folder: Path, *facts: dict[str, object]) -> None:
    run = folder / "trace" / "tiny"
    table = RecordTable(run, "causal_tracing")
    words = {"prompt": "p", "subject": "s", "answer": "a", "answer_tokens": 1, "tokens": []}
    nothing = {"is_known": False, "clean": 0.9, "corrupted": 0.8, "roles": ["last"]}
    for fact in ({**nothing, "effect": None}, *facts):
        effect = fact.pop("effect")
        values = dict.fromkeys(("state", "mlp", "attention"), effect)
        table.append([{**words, **fact, **values}], rollout=0, step=0)
    facts_of_run = {
        "status": "finished",
        "seed": 0,
        "started": "2026",
        "git": {"sha": "0123456789"},
    }
    facts_of_run["trace"] = {"tracing": {"window": 10}}
    (run / "run.json").write_text(json.dumps(facts_of_run))


def known(clean: float, effect: list[list[float]]) -> dict[str, object]:
    roles = ["last subject", "last"]
    return {"is_known": True, "clean": clean, "corrupted": 0.1, "roles": roles, "effect": effect}


def test_averages_are_over_known_facts_and_in_the_order_of_the_prompt(tmp_path):
    write(tmp_path, known(0.5, [[0.2, 0.0], [0.1, 0.3]]), known(0.7, [[0.4, 0.0], [0.1, 0.5]]))
    data = tracing.collect(tmp_path)
    assert list(dict.fromkeys(data["kind"])) == ["state", "mlp", "attention"]
    own = data[data["kind"] == "mlp"]
    assert list(own["role"]) == ["last subject"] * 2 + ["last"] * 2
    assert list(own["layer"]) == [0, 1, 0, 1]
    assert list(own["effect"]) == pytest.approx([0.3, 0.1, 0.0, 0.4])
    assert list(own["low"]) == pytest.approx([0.2, 0.1, 0.0, 0.3])
    assert list(own["high"]) == pytest.approx([0.4, 0.1, 0.0, 0.5])
    first = data.iloc[0]
    assert (first["known"], first["num_facts"], first["window"]) == (2, 2, 10)
    assert (first["clean"], first["corrupted"]) == (pytest.approx(0.6), pytest.approx(0.1))
    assert first["run"] == "trace/tiny@0123456"


def test_nothing_known_is_nothing_to_draw(tmp_path):
    write(tmp_path)
    with pytest.raises(MissingDataError, match="no known fact"):
        tracing.collect(tmp_path)
