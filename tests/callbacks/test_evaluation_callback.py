"""Evaluation: base before, tuned after, baselines beside them; rows, table, summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.measurements import records
from tropism_callbacks import Checkpoint, Evaluation, RunRecord

# The stand-in is right for prompts 0..rollout of 6: 1 before training, 5 after 4 rollouts.
# Wilson's interval of 1 of 6 and of 5 of 6 (Wilson 1927), to four digits.
BASE = pytest.approx([0.0301, 0.5635], abs=1e-4)
TUNED = pytest.approx([0.4365, 0.9699], abs=1e-4)


def test_first_and_last_rows(make_run: Callable[..., Any]) -> None:
    rows = records.read(make_run(Evaluation()).fit().folder, "evals")
    assert rows["rollout"].tolist() == [0, 4]
    assert rows["step"].tolist() == [0, 3]
    assert rows["benchmark"].tolist() == ["arithmetic"] * 2
    assert rows["n"].tolist() == [6, 6]
    assert rows["value"].tolist() == pytest.approx([1 / 6, 5 / 6])
    assert rows.loc[0, ["ci_low", "ci_high"]].tolist() == BASE
    assert rows.loc[1, ["ci_low", "ci_high"]].tolist() == TUNED
    assert rows[["k", "temperature", "max_tokens"]].to_numpy().tolist() == [[1, 0.0, 6]] * 2
    assert rows[["model", "metric"]].to_numpy().tolist() == [["base", "pass"], ["tuned", "pass"]]


def test_rows_between(make_run: Callable[..., Any]) -> None:
    rows = records.read(make_run(Evaluation(), val_check_interval=2).fit().folder, "evals")
    assert rows["rollout"].tolist() == [0, 2, 4]
    assert rows["value"].tolist() == pytest.approx([1 / 6, 3 / 6, 5 / 6])


def test_scalars(make_run: Callable[..., Any], events: Callable[[Path], Any]) -> None:
    read = events(make_run(Evaluation()).fit().folder)
    points = [(event.step, event.value) for event in read.Scalars("eval/arithmetic/pass")]
    assert points == [(0, pytest.approx(1 / 6)), (4, pytest.approx(5 / 6))]
    # right answers are one character long, all others empty, on which `short` abstains
    assert [e.value for e in read.Scalars("eval/arithmetic/short")] == [1.0, 1.0]


def test_table_and_summary(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(RunRecord(), Evaluation()).fit()
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    shown = {cells[2].strip(): [cell.strip() for cell in cells[3:6]] for cells in lines}
    assert shown == {
        "base": ["6", "0.167", "0.030 - 0.564"],
        "tuned": ["6", "0.833", "0.436 - 0.970"],
        "baseline constant": ["6", "0.167", "0.030 - 0.564"],
        "baseline echo": ["6", "0.000", "0.000 - 0.390"],
    }
    summary = json.loads((run.folder / "run.json").read_text())["summary"]
    result = summary["evaluation"]["arithmetic"]
    assert result["base"]["value"] == pytest.approx(1 / 6)
    assert result["tuned"]["n"] == 6
    assert result["difference"] == pytest.approx(4 / 6)
    assert result["baselines"]["echo"]["value"] == 0.0


def test_a_resumed_run_knows_its_base(make_run: Callable[..., Any], stand_in: type) -> None:
    def callbacks() -> tuple[Any, ...]:
        return RunRecord(), Evaluation(), Checkpoint(every_n_rollouts=2)

    settings = {"val_check_interval": 2}
    whole = make_run(*callbacks(), name="whole", **settings).fit()
    run = make_run(*callbacks(), module=stand_in(fail_at=3), **settings)
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    again = make_run(*callbacks(), **settings).fit(run.folder / "checkpoints" / "last.ckpt")
    rows, expected = (records.read(r.folder, "evals") for r in (again, whole))
    assert rows.equals(expected)
    summary = json.loads((again.folder / "run.json").read_text())["summary"]["evaluation"]
    assert summary["arithmetic"]["difference"] == pytest.approx(4 / 6)


def test_state_round_trip(make_run: Callable[..., Any]) -> None:
    evaluation = Evaluation()
    make_run(evaluation).fit()
    other = Evaluation()
    other.load_state_dict(json.loads(json.dumps(evaluation.state_dict())))
    assert other.summary() == evaluation.summary()


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_standalone_prints_the_table_and_writes_its_own_rows(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    run = make_run(Evaluation())
    getattr(run.trainer, stage)(run.module, datamodule=run.data)
    output = capsys.readouterr().out
    assert "model" in output
    assert "baseline echo" in output
    assert "tuned" not in output
    assert records.read(run.folder, "evals")["value"].tolist() == pytest.approx([1 / 6])


def test_standalone_writes_nothing_into_another_runs_folder(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = make_run(RunRecord(), Evaluation()).fit()
    before = {p: p.read_bytes() for p in trained.folder.rglob("*.json*")}
    run = make_run(RunRecord(), Evaluation())
    run.trainer.validate(run.module, datamodule=run.data)
    assert "model" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in trained.folder.rglob("*.json*")} == before


def test_partial_sanity_check_is_refused(make_run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"num_sanity_val_steps=1.*Set -1"):
        make_run(Evaluation(), num_sanity_val_steps=1).fit()


def test_without_a_base(make_run: Callable[..., Any]) -> None:
    evaluation = Evaluation()
    run = make_run(evaluation, num_sanity_val_steps=0).fit()
    assert records.read(run.folder, "evals")["rollout"].tolist() == [4]
    result = evaluation.summary()["evaluation"]["arithmetic"]
    assert result["base"] is None
    assert result["difference"] is None


def test_disabled_validation_writes_nothing(make_run: Callable[..., Any]) -> None:
    run = make_run(Evaluation(), limit_val_batches=0).fit()
    assert not (run.folder / "records" / "evals.jsonl").exists()
