"""`tropism test` on the organism: checkpoints against the base, a stop in between, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.cli import main
from tropism.evaluation.statistics import wilson_interval
from tropism.measurements.records import RecordTable, read
from tropism.models import LoRA, Model, load_policy
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.skills import Skills

CHECKPOINTS = ["--trainer.callbacks+", '{"class_path": "tropism_callbacks.Checkpoint", '
               '"init_args": {"every_n_rollouts": 2, "keep": 10}}']  # fmt: skip
SAMPLED = [
    "--suite.benchmarks",
    json.dumps(
        [
            {
                "task": {"class_path": "tropism.tasks.skills.Skills", "init_args": {"name": name}},
                "num_prompts": 3,
                "greedy": num_samples == 0,
                "num_samples": num_samples,
                "temperature": 0.8,
            }
            for name, num_samples in (("first", 2), ("second", 0))
        ]
    ),
]


@pytest.fixture
def suite(tropism: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``tropism test`` with the tiny config of ``tropism``; gives the suite's folder."""

    def run(*arguments: str) -> Path:
        main(["test", "--config", str(tmp_path / "tiny.yaml"), *arguments])
        return tmp_path / "runs" / "tiny" / "test"

    return run


def answers(run: Path, model: str, benchmark: str, mode: str) -> dict[str, list[str]]:
    return {
        row["prompt_id"]: row["texts"]
        for row in RecordTable(run, "eval_samples").rows()
        if (row["model"], row["benchmark"], row["mode"]) == (model, benchmark, mode)
    }


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of the organism that changes its answers."""
    policy = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in policy.named_trainable().items():
            if "lora_B" in name:
                value.normal_(std=0.05, generator=generator)
    return policy.export(tmp_path / "tuned")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many completions each call of the engine was asked for; -1 in it makes one fail."""
    calls: list[int] = []
    generate = TransformersEngine.generate

    def counted(self: TransformersEngine, prompts: Any, *, group_size: int, **how: Any) -> Any:
        if calls and calls[0] == -1 and len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(prompts) * group_size)
        return generate(self, prompts, group_size=group_size, **how)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    return calls


def test_two_checkpoints_against_the_base(tropism, suite, capsys):
    run = tropism("--model.init_args.optimizer.learning_rate=0.01", *CHECKPOINTS)
    early = json.dumps([str(run / "checkpoints" / "rollout=000002.ckpt")])
    folder = suite("--ckpt_path", str(run), "--suite.checkpoints", early, *SAMPLED)
    output = capsys.readouterr().out
    rows = read(folder, "evals")
    assert list(dict.fromkeys(rows["model"])) == ["base", "version_0", "rollout=000002.ckpt"]
    assert dict(zip(rows["model"], rows["rollout"], strict=True)) == {
        "base": 0, "version_0": 4, "rollout=000002.ckpt": 2
    }  # fmt: skip

    # The same as asking base and tuned policy in the way of training.
    task = Skills()
    prompts = task.prompts("test", 8, 0)
    how = {"group_size": 1, "seed": 0, "rollout": 0, "greedy": True}
    for model, path in (("base", None), ("version_0", str(run / "adapter"))):
        policy = load_policy(
            Model(name="organism", dtype="float32", adapter=path), LoRA(rank=4, alpha=8)
        )
        engine = TransformersEngine()
        engine.bind(policy)
        rollouts = engine.generate(prompts, sampling=Sampling(max_new_tokens=12), **how)
        texts = {r.prompt.id: [r.completions[0].text] for r in rollouts}
        assert answers(folder, model, "skills", "greedy") == texts
        passed = sum(task.score(r.prompt, r.completions[0].text)["accuracy"] for r in rollouts)
        own = rows[(rows["model"] == model) & (rows["benchmark"] == "skills")]
        (greedy,) = own[own["metric"] == "pass"].to_dict("records")
        rate = wilson_interval(int(passed), 8)
        assert [greedy["value"], greedy["ci_low"], greedy["ci_high"], greedy["n"]] == [
            rate.value, rate.low, rate.high, 8
        ]  # fmt: skip
        assert (greedy["split"], greedy["domain"], greedy["temperature"]) == ("test", "in", 0.0)

    sampled = rows[(rows["benchmark"] == "first") & (rows["model"] == "version_0")]
    assert sampled["metric"].tolist() == ["pass@1", "pass@2"]
    assert sampled["temperature"].tolist() == [0.8, 0.8]
    assert sampled["p_corrected"].ge(sampled["p"]).all()
    base = rows[(rows["benchmark"] == "first") & (rows["model"] == "base")]
    assert (sampled["value"].to_numpy() - base["value"].to_numpy()) == pytest.approx(
        sampled["difference"].to_numpy(float)
    )
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["suite"]["models"]["version_0"] == str(run / "adapter")
    won = record["summary"]["wins"]["version_0"]
    assert won["wins"] + won["losses"] + won["ties"] == 3
    assert "version_0: above the base on" in output
    assert (folder / "config.yaml").is_file()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    (event,) = events.Scalars("test/first/pass_at_2/version_0")
    assert event.step == 4
    assert event.value == pytest.approx(sampled["value"].iloc[1])


def test_a_stopped_suite_goes_on_and_repeats_nothing(suite, tmp_path, adapter, asked):
    command = ["--ckpt_path", str(adapter), "--suite.data_tasks=null", "--suite.batch_size=2"]
    command += SAMPLED
    asked.append(-1)  # the third batch fails
    with pytest.raises(KeyboardInterrupt):
        suite(*command)
    before = asked[1:]
    table = tmp_path / "runs" / "tiny" / "test" / "records" / "eval_samples.jsonl"
    assert not table.with_name("evals.jsonl").exists()
    with table.open("ab") as file:
        file.write(b'{"schema": 1, "rollout"')  # what a killed process leaves
    asked.clear()
    folder = suite(*command)
    gone_on, after = read(folder, "evals"), list(asked)
    asked.clear()
    suite(*command)
    assert asked == []  # all is done
    table.unlink()
    suite(*command)
    assert before + after == asked == [4, 2, 2, 1] * 2
    assert read(folder, "evals").equals(gone_on)
    assert len(json.loads((folder / "run.json").read_text())["attempts"]) == 4


def test_changed_settings_are_not_mistaken_for_done(suite, asked):
    def num_asked(*arguments: str) -> int:
        asked.clear()
        suite(*arguments)
        return sum(asked)

    greedy = ["--data.init_args.num_test_prompts=2", "--suite.data_tasks.max_new_tokens=4"]
    assert num_asked(*greedy) == 2
    assert num_asked("--data.init_args.num_test_prompts=3", greedy[1]) == 1  # two are known
    assert num_asked(greedy[0], "--suite.data_tasks.max_new_tokens=3") == 2
    assert num_asked(*greedy, "--model.init_args.model.chat_template=plain") == 2
    assert num_asked(*greedy, "--model.init_args.model.dtype=bfloat16") == 2
    assert num_asked(*greedy) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite.data_tasks.num_samples=2", "--suite.data_tasks.k=[4]"], "num_samples=2"),
        (["--suite.benchmarks", '[{"task": "tropism.tasks.skills.Skills", "split": "dev"}]'],
         "dev"),
        (["--suite.data_tasks=null"], "nothing to test"),
        (["--data.init_args.num_test_prompts=0"], "nothing to test"),
        (["--suite.checkpointz", "[x]"], "checkpointz"),
        (["--ckpt_path", "nowhere"], "give a .ckpt file"),
        (["--suite.base=false"], "no model to test"),
        (["--trainer.devices=2"], "trainer.devices=2"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_loading(suite, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(
        "tropism.evaluation.command.load_policy", lambda *_: pytest.fail("the model was loaded")
    )
    with pytest.raises((SystemExit, ValueError)) as error:
        suite(*arguments)
    assert message in capsys.readouterr().err + str(error.value)


def test_a_training_run_is_not_written_into(suite, tmp_path):
    folder = tmp_path / "runs" / "tiny" / "test"
    (folder / "records").mkdir(parents=True)
    (folder / "run.json").write_text('{"schema": 1, "status": "finished", "attempts": []}')
    with pytest.raises(ValueError, match="is the folder of a training run"):
        suite()


def test_benchmarks_of_the_suite_are_not_trained_on_and_testing_says_what_is_shared(
    tropism, suite, tmp_path, capsys
):
    trained = Skills().prompts("train", 16, 0)
    rows = [p.messages[-1]["content"].upper() for p in (trained[3], trained[7])]
    exam = tmp_path / "exam.jsonl"
    exam.write_text("".join(json.dumps({"prompt": t, "answer": ""}) + "\n" for t in rows))
    task = {
        "class_path": "tropism.tasks.rows.Rows",
        "init_args": {"path": str(exam), "scorer": "tropism.rewards.exact_match", "name": "exam",
                      "test_path": str(exam), "validation_fraction": 0},
    }  # fmt: skip
    exams = ("--suite.benchmarks", json.dumps([{"task": task}]))
    few = ("--data.init_args.num_rollouts=2", "--data.init_args.num_train_prompts=16")

    with pytest.warns(UserWarning, match=r"2 of 16 training prompts .*\(benchmark exam\)"):
        run = tropism(*few, *exams)
    kept = json.loads((run / "run.json").read_text())["summary"]["training_prompts"]
    assert (kept["contaminated"], kept["kept"]) == ({"skills": 2}, {"skills": 14})
    run = tropism(*few, *exams, "--data.init_args.decontaminate=off")
    kept = json.loads((run / "run.json").read_text())["summary"]["training_prompts"]
    assert kept["kept"] == {"skills": 16}

    capsys.readouterr()
    folder = suite(*few, *exams)
    found = json.loads((folder / "run.json").read_text())["shared_with_training"]
    assert found["decontaminate"] == "drop"
    counts = found["benchmarks"]
    assert {name: (c["skills"]["shared"], c["skills"]["of"]) for name, c in counts.items()} == {
        "skills": (0, 16), "exam": (2, 16)
    }  # fmt: skip
    assert counts["exam"]["skills"]["examples"][0]["trained_on"] == trained[3].id
    output = " ".join(capsys.readouterr().out.split())
    assert "exam: 2 of 16 training prompts of 'skills' share text with it" in output
