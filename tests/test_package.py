"""What is built and installed: both packages, their data, and every library that they import."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import tropism

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = (REPOSITORY / "src/tropism", REPOSITORY / "callbacks/tropism_callbacks")
# Imported for us: by transformers to read GGUF files, by Lightning's TensorBoardLogger.
INDIRECT = {"gguf", "tensorboard"}
EXTRAS = {"vllm"}


def normalized(requirement: str) -> str:
    """The distribution that a requirement names, as PEP 503 spells it."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Top-level modules imported at run time: blocks under TYPE_CHECKING do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.split(".")[0]
        yield from imported_names(node)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_both_packages_with_their_data_and_nothing_else(
    wheel: zipfile.ZipFile,
) -> None:
    on_disk = {
        path.relative_to(package.parent).as_posix()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store"
    }
    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert in_wheel == on_disk
    assert {"tropism/py.typed", "tropism_callbacks/py.typed"} <= in_wheel
    assert any(re.fullmatch(r"tropism/organism/.*\.safetensors", name) for name in in_wheel)


def test_wheel_says_version_licence_and_command(wheel: zipfile.ZipFile) -> None:
    folder = f"tropism-{tropism.__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert metadata["Version"] == tropism.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "tropism = tropism.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_installed_version_is_this_one() -> None:
    assert importlib.metadata.version("tropism") == tropism.__version__


def test_dependencies_are_what_the_code_imports() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {normalized(requirement) for requirement in project["dependencies"]}
    own = {package.name for package in PACKAGES}
    modules = {
        name
        for package in PACKAGES
        for path in package.rglob("*.py")
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8")))
    } - set(sys.stdlib_module_names)
    distributions = importlib.metadata.packages_distributions()
    imported = {normalized(distributions.get(name, [name])[0]) for name in modules - own - EXTRAS}
    assert imported - declared == set(), "imported, but not in pyproject.toml"
    assert declared - imported - INDIRECT == set(), "in pyproject.toml, but not imported"


def test_lock_meets_the_requirements() -> None:
    """Every requirement and development tool is pinned, so that set-up resolves nothing."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["bench"]]
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = {normalized(line) for line in lines if not line.startswith("#")}
    assert {normalized(requirement) for requirement in wanted} - locked == set()
