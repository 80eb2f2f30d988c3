"""Bad input and bad luck, through the command line: each error names its cause and the remedy."""

from pathlib import Path

import pytest
import torch
from lightning import Trainer

from tropism import GRPO, PromptDataModule
from tropism.measurements.records import read
from tropism.models import Model
from tropism.rewards import RewardError
from tropism.tasks.skills import Skills
from tropism.update import NonFiniteError

MODEL = "--model.init_args"


def test_unknown_model(tropism):
    with pytest.raises(ValueError, match=r"'no-such-model'.*organism"):
        tropism(f"{MODEL}.model.name", "no-such-model")


def test_unknown_class(tropism, capsys):
    with pytest.raises(SystemExit):
        tropism("--model.class_path", "tropism.Nothing")
    assert "Nothing" in capsys.readouterr().err


def test_group_of_one(tropism, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        tropism(f"{MODEL}.group_size", "1")
    assert "group_size=1" in capsys.readouterr().err + str(error.value)


def test_batch_that_the_group_does_not_divide(tropism, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        tropism("--data.init_args.batch_size", "10")
    message = capsys.readouterr().err + str(error.value)
    assert "batch_size=10" in message
    assert "group_size=4" in message
    assert "12" in message  # what would work


def test_empty_data(tropism, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    task = (
        '[{"class_path": "tropism.tasks.rows.Rows", "init_args": '
        f'{{"path": "{path}", "scorer": "tropism.rewards.exact_match"}}}}]'
    )
    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        tropism("--data.init_args.tasks", task)


def test_prompt_longer_than_the_context(tropism, monkeypatch):
    with pytest.raises(ValueError, match="more than the model's context"):
        tropism(f"{MODEL}.sampling.max_new_tokens", "5000")


def test_reward_that_raises_stops_and_names_function_and_row(tropism, monkeypatch):
    def broken(self, prompt, completion):
        raise KeyError("gold")

    monkeypatch.setattr(Skills, "score", broken)
    with pytest.raises(RewardError, match=r"Skills\.score.*KeyError.*prompt '.*completion"):
        tropism()


def test_loss_that_is_not_finite_stops_before_the_step(tropism, monkeypatch):
    from tropism import update

    calls = []
    original = update.policy_loss

    def poisoned(*args, **options):
        calls.append(1)
        result = original(*args, **options)
        return result._replace(loss=result.loss * float("nan")) if len(calls) > 2 else result

    monkeypatch.setattr(update, "policy_loss", poisoned)
    with pytest.raises(NonFiniteError, match="loss is nan"):
        tropism(
            f"{MODEL}.max_tokens_per_microbatch", "256",
            "--trainer.callbacks+",
            '{"class_path": "tropism_callbacks.Checkpoint", "init_args": {"every_n_rollouts": 1}}',
        )  # fmt: skip
    run = next(Path("runs/tiny").iterdir())
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    assert len(read(run, "steps")) == saved["tropism"]["rollout"]


def test_run_folder_that_cannot_be_written(tropism):
    # /proc refuses files even to root, whom permissions do not stop.
    logger = (
        '{"class_path": "lightning.pytorch.loggers.TensorBoardLogger", '
        '"init_args": {"save_dir": "/proc/self/runs"}}'
    )
    with pytest.raises((ValueError, OSError), match="/proc/self/runs"):
        tropism("--trainer.logger", logger)


def test_full_disk_ends_the_run_and_keeps_earlier_rows(tropism, monkeypatch):
    from tropism_callbacks import RunRecord

    original = RunRecord.after_update

    def fill(self, module, batch, metrics):
        if batch.rollout == 2:  # writing to /dev/full fails as a full disk does
            path = Path(module.trainer.log_dir) / "records" / "steps.jsonl"
            path.rename(path.with_suffix(".kept"))
            path.symlink_to("/dev/full")
        original(self, module, batch, metrics)

    monkeypatch.setattr(RunRecord, "after_update", fill)
    with pytest.raises((RuntimeError, OSError), match=r"(?i)disk|space"):
        tropism()
    kept = next(Path("runs/tiny").iterdir()) / "records" / "steps.kept"
    assert len(kept.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("precision", "bf16-true", "model.dtype"),
        ("max_epochs", "2", "num_rollouts"),
        ("max_steps", "2", "num_rollouts"),
    ],
)
def test_trainer_settings_with_another_meaning_here_are_refused(tropism, setting, value, remedy):
    with pytest.raises(ValueError, match=rf"trainer\.{setting}=.*{remedy}"):
        tropism(f"--trainer.{setting}", value)


def test_rollouts_without_signal_raise_the_alarm(tropism, monkeypatch):
    monkeypatch.setattr(Skills, "score", lambda *_: {"format": 1.0, "accuracy": 0.0})
    with pytest.raises(RuntimeError, match="2 rollouts in a row"):
        tropism(f"{MODEL}.max_rollouts_without_signal", "2")
    run = next(Path("runs/tiny").iterdir())
    steps = read(run, "steps")
    assert steps["step"].tolist() == [0, 0]  # no optimizer step was taken
    assert steps["frac_reward_zero_std"].tolist() == [1, 1]


def test_a_run_that_learnt_nothing_says_so(tropism, monkeypatch):
    monkeypatch.setattr(Skills, "score", lambda *_: {"format": None, "accuracy": None})
    with pytest.warns(UserWarning, match="No optimizer step was taken"):
        tropism("--data.init_args.num_rollouts", "1")


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test"])
@pytest.mark.parametrize("setting", ["trainer.devices", "trainer.num_nodes"])
def test_several_devices_are_refused_before_a_process_starts(
    tropism, monkeypatch, subcommand, setting
):
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
    monkeypatch.setattr(f"{launcher}.launch", lambda *_, **__: pytest.fail("processes started"))
    with pytest.raises(ValueError, match=rf"{setting}=2.*add --trainer.devices 1"):
        tropism(f"--{setting}", "2", "--trainer.strategy", "ddp", subcommand=subcommand)
    assert not Path("runs").exists()


def test_several_devices_are_refused_outside_the_command_too():
    module = GRPO(model=Model(name="organism"))
    data = PromptDataModule([Skills()], batch_size=8, group_size=8, num_rollouts=1)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False)
    module.trainer = trainer
    trainer.datamodule = data
    with pytest.raises(ValueError, match=r"trainer.devices=2"):
        module.setup("fit")
