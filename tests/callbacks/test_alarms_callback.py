"""Alarms in real runs: silent on a healthy one, resumed alike, shown where they ring."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tropism.measurements.records import read
from tropism_callbacks import Alarms, Checkpoint, RunRecord

Tropism = Callable[..., Path]


def alarms(**settings: Any) -> list[str]:
    value = {"class_path": "tropism_callbacks.Alarms", "init_args": settings}
    return ["--trainer.callbacks+", json.dumps(value)]


@pytest.mark.parametrize("num_rollouts", [12, pytest.param(30, marks=pytest.mark.long)])
def test_a_healthy_run_is_silent(tropism: Tropism, events: Any, num_rollouts: int) -> None:
    options = [f"--data.init_args.num_rollouts={num_rollouts}", "--trainer.limit_val_batches=0"]
    options += ["--data.init_args.batch_size=32", "--model.init_args.group_size=8"]
    options += ["--data.init_args.num_train_prompts=1000"]
    options += ["--model.init_args.sampling.max_new_tokens=32"]
    run = tropism(*options, *alarms())
    assert len(read(run, "alarms")) == 0
    logged = events(run)
    tags = [tag for tag in logged.Tags()["scalars"] if tag.startswith("alarms/")]
    assert len(tags) == 6
    for tag in tags:
        assert [point.value for point in logged.Scalars(tag)] == [0.0] * num_rollouts


RINGS = alarms(  # on anything at all, after two rollouts
    all_groups_zero_variance=None,
    entropy_collapse=None,
    exploding_gradient_norm={"factor": 1.0, "in_a_row": 1, "window": 1, "least": 1},
    tag_spam={"share": 0.0, "in_a_row": 2},
)


@pytest.mark.filterwarnings("ignore:rollout")
def test_a_resumed_run_records_what_the_whole_run_records(tropism: Tropism) -> None:
    options = [*RINGS, "--data.init_args.num_rollouts=4", "--trainer.limit_val_batches=0"]
    checkpoint = {"class_path": "tropism_callbacks.Checkpoint"}
    checkpoint["init_args"] = {"every_n_rollouts": 2, "keep": 10}  # type: ignore[assignment]
    options += ["--trainer.callbacks+", json.dumps(checkpoint)]
    run = tropism(*options)
    whole = read(run, "alarms")
    assert whole[whole["alarm"] == "tag_spam"]["event"].tolist() == ["begins"]
    norms = read(run, "steps")["grad_norm"].tolist()
    changes = whole[whole["alarm"] == "exploding_gradient_norm"]
    on = [False] + [later > before for before, later in pairwise(norms)]
    expected = [(i, "begins" if on[i] else "ends") for i in range(1, 4) if on[i] != on[i - 1]]
    assert list(zip(changes["rollout"], changes["event"], strict=True)) == expected
    assert any(rollout >= 2 for rollout, _ in expected)
    tropism(*options, "--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt"))
    assert read(run, "alarms").equals(whole)


def test_it_warns_once_and_tells_tensorboard(make_run: Any, stand_in: type, events: Any) -> None:
    # The gradient norm is 3 in every rollout with a step; rollout 1 has none.
    alarm = Alarms(tag_spam=None)
    run = make_run(RunRecord(), alarm)
    object.__setattr__(alarm.alarms[-1], "in_a_row", 1)  # of all_groups_zero_variance
    with pytest.warns(UserWarning, match="rollout 1, all_groups_zero_variance: in 1 rollouts"):
        run.fit()
    rows = read(run.folder, "alarms")
    assert rows[["rollout", "event", "value", "threshold"]].to_numpy().tolist() == [
        [1, "begins", 1.0, 1.0],
        [2, "ends", 0.0, 1.0],
    ]
    assert not alarm.findings["all_groups_zero_variance"].is_on
    points = events(run.folder).Scalars("alarms/all_groups_zero_variance")
    assert [point.value for point in points] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.filterwarnings("ignore:rollout")
def test_no_second_warning_after_a_resume(make_run: Any, stand_in: type) -> None:
    import warnings

    settings = {"all_groups_zero_variance": None, "tag_spam": spam_of_anything()}
    parts = [RunRecord(), Alarms(**settings), Checkpoint(every_n_rollouts=1)]
    with pytest.raises(RuntimeError, match="the reward of row 3"):
        make_run(*parts, module=stand_in(fail_at=2)).fit()
    parts = [RunRecord(), Alarms(**settings), Checkpoint(every_n_rollouts=1)]
    again = make_run(*parts)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rollout")
        again.fit(again.folder / "checkpoints" / "last.ckpt")
    assert read(again.folder, "alarms")["event"].tolist() == ["begins"]


def spam_of_anything() -> Any:
    from tropism.measurements.alarms import TagSpam

    return TagSpam(share=0.0, in_a_row=1)


def test_a_component_that_the_run_has_not_is_refused(tropism: Tropism) -> None:
    wrong = alarms(format_paid_while_accuracy_falls={"goal": "right"})
    with pytest.raises(ValueError, match=r"goal='right' is no component of this run: choose"):
        tropism(*wrong)
