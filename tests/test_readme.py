"""What the README says exists does."""

import re
import tomllib
from pathlib import Path

import pytest

from tropism.measurements import metrics
from tropism.measurements.records import TABLES

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
GLOSSARY = TEXT[TEXT.index("### Metrics") : TEXT.index("## Where things are")]


def block(name: str) -> str:
    """The code whose first line is ``# name``."""
    found = re.search(rf"```(?:python|yaml)\n(# {re.escape(name)}\n.*?)```", TEXT, re.DOTALL)
    assert found is not None, name
    return found[1]


def test_files_that_it_names_exist():
    named = set(re.findall(r"(?:experiments|paper_figures)/[\w/.-]+\.\w+", TEXT))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", TEXT)) <= targets


def test_glossary_defines_every_metric():
    names = {
        value
        for name, value in vars(metrics).items()
        if name.isupper() and isinstance(value, str) and "/" in value
    }
    assert sorted(name for name in names if f"`{name}`" not in GLOSSARY) == []


def test_columns_in_the_glossary_exist():
    for table, column in re.findall(r"\| (\w+)\.(\w+)[ ,]", GLOSSARY):
        assert column in TABLES[table], (table, column)


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = TEXT[TEXT.index("## Why each dependency") :]
    for requirement in project["dependencies"]:
        name = re.split(r"[\[<>=~! ]", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", table), name


def test_classes_that_it_names_exist():
    import importlib

    from tropism.cli import DEFAULT_CALLBACKS

    paths = set(re.findall(r"`(tropism\.[\w.]+\.[A-Z]\w+)`", TEXT))
    paths |= {callback["class_path"] for callback in DEFAULT_CALLBACKS}
    for path in paths:
        module, name = path.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name), path


# The organism never writes a bare sum to such a prompt: nothing is learnt, and that is said.
@pytest.mark.filterwarnings("ignore:No optimizer step was taken")
def test_own_data_and_reward_as_it_shows(tmp_path, monkeypatch):
    """The user's YAML and reward, as printed, but for a model and data that are here."""
    import json

    from tropism.cli import main
    from tropism.measurements.records import read

    reward, config = block("my_reward.py"), block("my.yaml")
    config = re.sub(r"model: \{name: .*", "model: {name: organism}\n    group_size: 4", config)
    config = config.replace("batch_size: 32 ", "batch_size: 8 ").replace("100", "1")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (tmp_path / "my_reward.py").write_text(reward)
    (tmp_path / "my.yaml").write_text(config)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    limits = ["--data.init_args.num_validation_prompts", "4", "--trainer.accelerator", "cpu"]
    limits += ["--data.init_args.num_test_prompts", "0"]
    main(["fit", "--config", "my.yaml", *limits])
    assert len(read("runs/my/version_0", "steps")) == 1


def test_own_policy_as_it_shows(tropism, tmp_path, monkeypatch):
    from tropism.adaptation.replay import main as replay
    from tropism.measurements.records import read

    code = block("my_policy.py")
    assert len(code.splitlines()) <= 26
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.yaml").write_text("""
trainer:
  callbacks+:
    - class_path: tropism_callbacks.Pressure
      init_args: {every_n_rollouts: 1, probes_per_reading: 2}
    - class_path: tropism_callbacks.AdaptiveLoRA
      init_args: {policy: {class_path: my_policy.HalfSteps, init_args: {below: 2.0}}}
""")
    run = tropism("--config", "mine.yaml", "--data.init_args.num_rollouts", "3")
    assert set(read(run, "plans")["lr_scale"]) == {0.5, 1.0}
    assert replay([str(run)]) == 0


@pytest.mark.parametrize("name", ["quickstart", "plan_timeline"])
def test_figures_redraw_from_committed_data(name, tmp_path):
    import shutil

    from paper_figures.__main__ import main

    shutil.copytree(ROOT / "paper_figures" / "data", tmp_path / "data")
    main(["--only", name], output=tmp_path)
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 10_000
    main(["--only", name], output=tmp_path)
