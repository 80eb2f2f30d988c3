"""``make mutants``: its table cannot rot, and its verdicts are right."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", Path(__file__).parent / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_mutant_applies_to_the_source(mutants: ModuleType) -> None:
    _, table = mutants.load()
    assert mutants.stale(table) == []
    assert [mutant for mutant in table if mutant.old == mutant.new] == []
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in table}) == len(table)


def test_every_fault_has_a_test_and_a_mutant(mutants: ModuleType) -> None:
    required, table = mutants.load()
    mutated, tested = {mutant.fault for mutant in table}, set(mutants.marked_files())
    assert set(required) <= tested
    assert mutated == tested  # a new fault(n) needs an entry in mutants.toml


@pytest.fixture
def repository(mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny one: a package that adds, and a test of fault 1 that looks at sums of 2 alone."""
    files = {
        "src/tropism/__init__.py": "def add(a, b):\n    return a + b\n",
        "callbacks/tropism_callbacks/__init__.py": "",
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["fault(n): x"]\n',
        "tests/test_sum.py": "import pytest, tropism\n\n"
        "@pytest.mark.fault(1)\ndef test_two():\n    assert tropism.add(1, 1) == 2\n\n"
        "@pytest.mark.fault(2)\ndef test_five():\n    assert tropism.add(2, 3) == 5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path / "tests")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "COPIED", ("src", "callbacks", "tests", "pyproject.toml"))
    monkeypatch.setenv("PYTHONPATH", "")
    return tmp_path


def test_verdicts_and_what_is_left_alone(
    mutants: ModuleType, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = mutants.Copy(tmp_path_factory.mktemp("copy"))
    assert copy.test([1, 2]).returncode == 0

    def verdict(new: str) -> tuple[str, str]:
        mutant = mutants.Mutant(1, "src/tropism/__init__.py", "", old="a + b", new=new)
        found: tuple[str, str] = copy.verdict(mutant)
        return found

    assert verdict("a - b") == ("killed", "test_two")
    assert verdict("a * b + (a == b)") == ("SURVIVED", "no test")  # wrong, but for 1 + 1
    assert verdict("a +")[0] == "BROKEN"
    assert copy.test([1, 2]).returncode == 0  # each was undone
    assert (repository / "src/tropism/__init__.py").read_text().endswith("return a + b\n")


@pytest.mark.parametrize(("old", "count"), [("a - b", 0), ("a", 3)])
def test_a_text_that_is_not_there_once_is_named(
    mutants: ModuleType, repository: Path, old: str, count: int
) -> None:
    mutant = mutants.Mutant(1, "src/tropism/__init__.py", "", old=old, new="")
    (problem,) = mutants.stale([mutant], repository)
    assert f"fault 1: {old!r} occurs {count} times in src/tropism/__init__.py" in problem
