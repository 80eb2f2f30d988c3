from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from tropism import provenance
from tropism.provenance import RunFile, collect, git_state, hardware, whole_folder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "module.py").write_text("1\n")
    git(folder, "add", "module.py")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


def test_git_state_of_a_clean_and_a_changed_checkout(checkout: Path) -> None:
    file = checkout / "module.py"
    sha = git(checkout, "rev-parse", "HEAD")
    assert git_state(file) == {"sha": sha, "dirty": False}
    file.write_text("2\n")
    assert git_state(file) == {"sha": sha, "dirty": True}


def test_an_installed_package_does_not_borrow_its_surroundings_commit(checkout: Path) -> None:
    installed = checkout / ".venv" / "module.py"
    installed.parent.mkdir()
    installed.write_text("1\n")
    assert git_state(installed) == {"sha": None, "dirty": None}


def test_no_checkout_and_no_git(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text("")
    assert git_state(tmp_path / "alone.py") == {"sha": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(checkout / "module.py") == {"sha": None, "dirty": None}


def test_collect_is_plain_json_and_names_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tropism", "fit", "--config", "my file.yaml"])
    facts = collect(seed=3, model={"source": "hub"}, data={"structured": "v1"})
    assert json.loads(json.dumps(facts)) == facts
    assert facts["command"] == "tropism fit --config 'my file.yaml'"
    assert facts["seed"] == 3
    assert facts["model"] == {"source": "hub"}
    assert facts["data"] == {"structured": "v1"}
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["versions"]["tropism"] == "0.1.0"
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    started = datetime.fromisoformat(facts["started"])
    assert started.utcoffset() == timedelta(0)


def test_an_absent_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-package",))
    assert collect()["versions"]["no-such-package"] is None


def test_hardware_counts_the_cores_that_this_process_may_use() -> None:
    facts = hardware()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    total_kb = int(Path("/proc/meminfo").read_text().split()[1])
    assert facts["memory_gb"] == pytest.approx(total_kb * 1024 / 1e9, abs=0.1)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, tropism.provenance; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    run = RunFile(tmp_path / "runs" / "v0")
    run.start({"seed": 1, "started": "t0"})
    assert run.read()["status"] == "running"
    run.update(trainable_params=12)
    run.finish({"pass_rate": np.float32(0.5), "loss": float("nan"), "path": tmp_path})
    content = json.loads(run.path.read_text())
    assert content["seed"] == 1
    assert content["status"] == "finished"
    assert content["trainable_params"] == 12
    assert content["summary"] == {"pass_rate": 0.5, "loss": None, "path": str(tmp_path)}
    assert content["attempts"][0]["finished"] == content["finished"]
    assert [p.name for p in run.path.parent.iterdir()] == ["run.json"]


def test_a_resumed_run_keeps_its_first_attempt(tmp_path: Path) -> None:
    RunFile(tmp_path).start({"seed": 1, "git": {"sha": "a"}})
    resumed = RunFile(tmp_path)
    resumed.start({"seed": 1, "git": {"sha": "b"}})
    resumed.finish({"pass_rate": 1.0})
    content = resumed.read()
    assert content["git"] == {"sha": "a"}
    assert [attempt["git"]["sha"] for attempt in content["attempts"]] == ["a", "b"]
    assert [attempt["status"] for attempt in content["attempts"]] == ["running", "finished"]


def test_a_failed_write_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFile(tmp_path)
    run.start({"seed": 1})
    before = run.path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provenance.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        run.update(seed=2)
    assert run.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_run_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json.*move it away"):
        RunFile(tmp_path).start({})


def fill(folder: Path, text: str, error: type[BaseException] | None = None) -> None:
    with whole_folder(folder) as filling:
        (filling / "file").write_text(text)
        if error is not None:
            raise error


def test_whole_folder_replaces_and_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    fill(target, "one")
    fill(target, "two")
    assert (target / "file").read_text() == "two"
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_whole_folder_survives_what_goes_wrong(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt):
        fill(target, "half", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    fill(target, "one")
    with pytest.raises(KeyboardInterrupt):
        fill(target, "half", KeyboardInterrupt)
    assert (target / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_whole_folder_after_a_kill_between_its_renames(tmp_path: Path) -> None:
    target = tmp_path / "target"
    fill(target, "one")
    target.rename(tmp_path / ".target.old")
    (tmp_path / ".target.part").mkdir()
    with pytest.raises(KeyboardInterrupt):
        fill(target, "half", KeyboardInterrupt)
    assert (target / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_whole_folder_takes_the_older_one_back_when_its_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    fill(target, "one")
    replace = os.replace

    def fail_once(source: Path, destination: Path) -> None:
        if Path(source).name == ".target.part":
            raise OSError(13, "Permission denied")
        replace(source, destination)

    monkeypatch.setattr(provenance.os, "replace", fail_once)
    with pytest.raises(OSError, match="Permission denied"):
        fill(target, "two")
    assert (target / "file").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
