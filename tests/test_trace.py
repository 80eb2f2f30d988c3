"""`tropism trace`: records that go on after a stop, and a plan that Replay takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from tropism.adaptation.placement import Replay
from tropism.cli import main
from tropism.measurements.records import read
from tropism.measurements.traced_effects import averages, effects, strongest_layers
from tropism.trace import _parser

ROOT = Path(__file__).resolve().parents[1]
ASKED = "<bos><|user|>{}<|end|><|assistant|>"
FACTS = [
    {"prompt": ASKED.format("sort dca"), "subject": "dca", "answer": "acd"},
    {"prompt": ASKED.format("reverse ab"), "subject": "ab", "answer": "7"},  # never
    {"prompt": ASKED.format("1+1="), "subject": "+1", "answer": "2"},
]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    (tmp_path / "trace.yaml").write_text(
        "model: {name: organism, dtype: float32}\nfacts: facts.jsonl\noutput: traced\n"
        "tracing: {num_copies: 2, window: 4}\n"
    )
    return lambda *arguments: main(["trace", "--config", "trace.yaml", *arguments])


def test_known_facts_are_traced_and_a_stopped_tracing_goes_on(trace, tmp_path, capsys):
    trace()
    assert "last subject" in capsys.readouterr().out
    rows = read(tmp_path / "traced", "causal_tracing").to_dict("records")
    assert [row["is_known"] for row in rows] == [True, False, True]
    assert rows[1]["state"] is None
    assert (rows[0]["answer_tokens"], rows[0]["tokens"]) == (
        3,
        [*"dca", "<|end|>", "<|assistant|>"],
    )
    state = np.array(rows[0]["state"])
    assert state.shape == (12, 5)
    # The last layer's state at the last token alone decides the answer.
    total = rows[0]["clean"] - rows[0]["corrupted"]
    assert state[-1] == pytest.approx([0, 0, 0, 0, total], abs=1e-6)

    # Interrupted in the middle of the third row: it is traced again, and nothing else.
    file = tmp_path / "traced" / "records" / "causal_tracing.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-40])
    trace()
    assert file.read_text() == whole
    assert "3 of 3" in (told := capsys.readouterr().out)
    assert "2 of 3" not in told
    assert json.loads((tmp_path / "traced" / "run.json").read_text())["summary"]["known"] == 2

    with pytest.raises(ValueError, match=r"another tracing .*give another folder"):
        trace("--tracing.noise", "2")
    (tmp_path / "facts.jsonl").write_text(json.dumps(FACTS[0]) + "\n")
    with pytest.raises(ValueError, match="another facts"):
        trace()


def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(trace, monkeypatch):
    monkeypatch.setattr("tropism.models.load_policy", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="give float32"):
        trace("--model.dtype", "bfloat16")
    with pytest.raises(ValueError, match="Replay reads FOLDER"):
        trace("--plan_file", "plan.jsonl")
    with pytest.raises(ValueError, match="does not exist"):
        trace("--facts", "none.jsonl")


PLAN = ["--plan_file", "traced/records/plans.jsonl", "--plan.k", "2", "--plan.rank", "4"]


def found_plan(folder: Path) -> pd.DataFrame:
    """The plan written, which must be of the two layers found."""
    table = read(folder, "plans")
    trained = table[table["state"] == "TRAIN"]
    assert set(trained["module"]) == {"gate_proj", "up_proj", "down_proj"}
    assert set(trained["rank"]) == {4}
    means = averages(effects(read(folder, "causal_tracing").to_dict("records")))
    best = strongest_layers(means, kind="mlp", role="last subject", k=2)
    assert sorted(set(trained["layer"])) == list(best)
    assert (len(table), len(trained)) == (12 * 7, 2 * 3)
    return table


def test_the_plan_is_of_the_layers_found_and_replay_reads_it(trace, tmp_path):
    trace(*PLAN)
    table = found_plan(tmp_path / "traced")
    [(rollout, plan)] = Replay(plans="traced").schedule
    assert rollout == 0
    assert [entry.state for entry in plan] == list(table["state"])


@pytest.mark.long
def test_the_plan_of_a_traced_adapter_is_in_force_in_another_run(trace, tropism, tmp_path):
    run = tropism("--data.init_args.num_rollouts", "2")
    trace("--model.adapter", str(run), "--lora.rank", "4", "--lora.alpha", "8", *PLAN)
    table = found_plan(tmp_path / "traced")
    (tmp_path / "replay.yaml").write_text("""
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args:
        every_n_rollouts: 1
        policy: {class_path: tropism.adaptation.placement.Replay, init_args: {plans: traced}}
""")
    replayed = tropism("--config", "replay.yaml", "--data.init_args.num_rollouts", "2")
    in_force = read(replayed, "plans").tail(len(table))
    assert list(in_force["state"]) == list(table["state"])


def test_the_shipped_config_has_the_defaults_of_the_paper():
    path = ROOT / "experiments" / "scalpel" / "trace.yaml"
    options = _parser().parse_args(["--config", str(path)])
    assert (options.tracing.noise, options.tracing.num_copies, options.tracing.window) == (
        3,
        10,
        10,
    )
    assert (ROOT / options.facts).is_file()
    assert yaml.safe_load(path.read_text())["output"].startswith("runs/trace/")


# -- averages ------------------------------------------------------------------------------------


def rows():
    """Two known facts of two layers: with and without a first subject token."""
    nothing = {"is_known": False, "roles": ["last"], "state": None, "mlp": None, "attention": None}
    one = {
        "is_known": True,
        "roles": ["last subject", "further", "further", "last"],
        "state": [[0.1, 0.2, 0.4, 0.0], [0.3, 0.0, 0.0, 0.8]],
    }
    other = {
        "is_known": True,
        "roles": ["first subject", "last subject", "last"],
        "state": [[0.5, 0.7, 0.0], [0.5, 0.1, 0.4]],
    }
    return [
        nothing,
        *({**row, "mlp": row["state"], "attention": row["state"]} for row in (one, other)),
    ]


def test_effects_are_averaged_over_tokens_of_a_role_then_facts():
    table = effects(rows())
    assert set(table["fact"]) == {1, 2}
    means = averages(table).set_index(["kind", "role", "layer"])
    for role, layer, effect, num in [
        ("first subject", 0, 0.5, 1),
        ("last subject", 0, 0.4, 2),
        ("last subject", 1, 0.2, 2),
        ("further", 0, 0.3, 1),
        ("last", 1, 0.6, 2),
    ]:
        for kind in ("state", "mlp", "attention"):
            found = means.loc[(kind, role, layer)]
            assert (found["effect"], found["num_facts"]) == (pytest.approx(effect), num)


def test_the_strongest_layers_are_those_of_the_role():
    means: pd.DataFrame = averages(effects(rows()))
    assert strongest_layers(means, kind="mlp", role="last subject", k=1) == {0: pytest.approx(0.4)}
    assert list(strongest_layers(means, kind="mlp", role="last", k=2)) == [0, 1]
    with pytest.raises(ValueError, match=r"plan\.k=3: the model has 2 layers"):
        strongest_layers(means, kind="mlp", role="last", k=3)
    with pytest.raises(ValueError, match="no known fact has such a token"):
        strongest_layers(means, kind="mlp", role="middle subject", k=1)
