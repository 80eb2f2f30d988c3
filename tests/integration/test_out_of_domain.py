"""Tasks that are evaluated beside the trained ones: rows, rewards, resume, and training unmoved."""

import json

import pytest

from tropism.cli import main
from tropism.measurements.records import read

TASKS = [
    "--data.init_args.tasks",
    json.dumps(
        [{"class_path": "tropism.tasks.skills.Skills", "init_args": {"skills": ["add", "sort"]}}]
    ),
]
OTHERS = [
    "--data.init_args.out_of_domain_tasks",
    json.dumps(
        [
            {
                "class_path": "tropism.tasks.skills.Skills",
                "init_args": {"skills": ["record", "bracket"], "name": "other"},
            }
        ]
    ),
    "--data.init_args.num_out_of_domain_prompts=6",
]
WEIGHTS = ["--model.init_args.reward_weights", '{"format": 0.2, "accuracy": 1.0}']


def test_rows_of_both_domains_beside_the_same_training(tropism):
    alone = tropism(*TASKS, *WEIGHTS, "--trainer.val_check_interval=2")
    evals = read(alone, "evals")
    assert evals[["rollout", "benchmark", "domain", "split"]].to_numpy().tolist() == [
        [rollout, "skills", "in", "validation"] for rollout in (0, 2, 4)
    ]
    run = tropism(*TASKS, *OTHERS, *WEIGHTS, "--trainer.val_check_interval=2")
    both = read(run, "evals")
    assert both["benchmark"].tolist() == ["skills", "other"] * 3
    assert both["domain"].tolist() == ["in", "out"] * 3
    assert both["n"].tolist() == [8, 6] * 3
    in_domain = both[both["domain"] == "in"].reset_index(drop=True)
    assert in_domain.equals(evals)
    assert read(run, "completions").equals(read(alone, "completions"))
    assert read(run, "steps")["loss"].equals(read(alone, "steps")["loss"])
    assert set(read(run, "rewards")["component"]) == {"format", "accuracy"}
    summary = json.loads((run / "run.json").read_text())["summary"]["evaluation"]
    assert summary["other"]["base"]["n"] == 6


def test_their_scalars(tropism):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tropism(*TASKS, *OTHERS)
    read_events = EventAccumulator(str(run)).Reload()
    for name in ("pass", "format", "accuracy"):
        assert [event.step for event in read_events.Scalars(f"eval/other/{name}")] == [0, 4]


@pytest.mark.parametrize(("command", "split"), [("validate", "validation"), ("test", "test")])
def test_standalone(tropism, tmp_path, capsys, command, split):
    main([command, "--config", str(tmp_path / "tiny.yaml"), *TASKS, *OTHERS, *WEIGHTS])
    (run,) = (tmp_path / "runs" / "tiny").iterdir()
    rows = read(run, "evals")
    rows = rows[rows["metric"] == "pass"]
    assert rows[["benchmark", "domain", "split", "n"]].to_numpy().tolist() == [
        ["skills", "in", split, 8],
        ["other", "out", split, 6],
    ]
    assert "other (out of" in capsys.readouterr().out


def test_resume_and_a_domain_added_on_the_way(tropism):
    every = ["--trainer.callbacks+", '{"class_path": "tropism_callbacks.Checkpoint", "init_args": '
             '{"every_n_rollouts": 2, "keep": 10}}']  # fmt: skip
    run = tropism(*TASKS, *OTHERS, *every)
    whole = read(run, "evals")
    checkpoint = ["--ckpt_path", str(run / "checkpoints" / "rollout=000002.ckpt")]
    tropism(*TASKS, *OTHERS, *every, *checkpoint)
    assert read(run, "evals").equals(whole)
    alone = tropism(*TASKS, *every)
    checkpoint = ["--ckpt_path", str(alone / "checkpoints" / "rollout=000002.ckpt")]
    tropism(*TASKS, *OTHERS, *every, *checkpoint)
    assert read(alone, "evals")["benchmark"].tolist() == ["skills", "skills", "other"]


def test_sft_evaluates_them_too(tropism_sft):
    evals = read(tropism_sft(*TASKS, *OTHERS), "evals")
    assert evals["domain"].tolist() == ["in", "out"] * 2
