"""The command line: what is accepted, what is refused while parsing, what is printed."""

import pytest
import yaml

from tropism.cli import main

CONFIG = """
seed_everything: 3
model:
  class_path: tropism.GRPO
  init_args:
    model: {name: organism, dtype: float32}
    group_size: 4
data:
  class_path: tropism.PromptDataModule
  init_args:
    tasks: [{class_path: tropism.tasks.skills.Skills}]
    batch_size: 8
    num_rollouts: 2
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(CONFIG)
    return str(path)


def print_config(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", *arguments, "--print_config"])
    assert exit_info.value.code in (0, None)
    return capsys.readouterr().out


def test_print_config_round_trips(config, capsys, tmp_path):
    printed = print_config(capsys, "--config", config)
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert yaml.safe_load(print_config(capsys, "--config", str(again))) == yaml.safe_load(printed)
    complete = yaml.safe_load(printed)
    assert complete["seed_everything"] == 3
    assert complete["model"]["init_args"]["objective"]["clip_low"] == 0.2
    assert "seed" not in complete["model"]["init_args"]  # linked from seed_everything


def test_default_callbacks_can_be_added_to(config, capsys):
    added = '[{"class_path": "lightning.pytorch.callbacks.DeviceStatsMonitor"}]'
    complete = yaml.safe_load(
        print_config(capsys, "--config", config, "--trainer.callbacks+", added)
    )
    names = [
        callback["class_path"].rsplit(".", 1)[-1] for callback in complete["trainer"]["callbacks"]
    ]
    assert names[0] == "RunRecord"
    assert names[-1] == "DeviceStatsMonitor"
    assert len(names) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.init_args.group_sise", "8"], "group_sise"),
        (["--model.init_args.objective.clip_hihg", "0.3"], "clip_hihg"),
        (["--model.init_args.objective.loss", "ppo"], "ppo"),
        (["--model", "tropism.GRPPO"], "GRPPO"),
        (["--data.init_args.tasks", '[{"class_path": "tropism.tasks.Nothing"}]'], "Nothing"),
        (["--model.init_args.group_size", "eight"], "eight"),
    ],
)
def test_misspelt_settings_fail_while_parsing(config, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--config", config, *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.init_args.group_size", "1"], "group_size=1"),
        (["--data.init_args.batch_size", "10"], "batch_size=10"),
        (["--model.init_args.lora.alpha", "24"], "alpha=24"),
        (["--model.init_args.sampling.temperature", "0"], "temperature=0"),
        (["--model.init_args.objective.beta", "-1"], "beta=-1"),
    ],
)
def test_values_that_cannot_work_fail_before_anything_is_loaded(
    config, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(
        "tropism.finetuning.load_policy", lambda *_: pytest.fail("the model was loaded")
    )
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["fit", "--config", config, *arguments])
    assert message in capsys.readouterr().err + str(error.value)


def test_only_what_has_a_meaning_here_is_offered(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "fit" in out
    assert "predict" not in out
