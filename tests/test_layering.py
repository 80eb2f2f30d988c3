"""Imports run downward, and light modules stay light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
HEAVY = ("lightning", "peft", "pytorch_lightning", "torch", "transformers", "vllm")


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that sees the packages in ``folder``."""
    path = os.pathsep.join(str(folder / name) for name in ("src", "callbacks"))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def lint_imports(folder: Path, contract: str | None = None) -> subprocess.CompletedProcess[str]:
    """Check the contracts of pyproject.toml, or one of them."""
    contracts = () if contract is None else (contract,)
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports(limit_to_contracts={contracts!r}, no_cache=True, no_logo=True))"
    )
    return run_python(code, folder)


def copy_sources(target: Path) -> None:
    unneeded = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("src", "callbacks"):
        shutil.copytree(REPOSITORY / name, target / name, ignore=unneeded)
    shutil.copy(REPOSITORY / "pyproject.toml", target)


def test_imports_run_downward() -> None:
    result = lint_imports(REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("contract", "file", "line", "message"),
    [
        ("layers", "src/tropism/types.py", "import tropism.tasks.base", "tropism.types is not"),
        ("layers", "src/tropism/tasks/base.py", "import tropism.lora", "tropism.tasks is not"),
        ("layers", "src/tropism/attic.py", "", "- tropism.attic"),
        ("callbacks", "src/tropism/types.py", "import tropism_callbacks", "tropism is not"),
        ("records", "src/tropism/measurements/records.py", "import torch", "to import torch"),
        ("vllm", "src/tropism/rollouts/engine.py", "import vllm", "tropism is not"),
        ("vllm", "callbacks/tropism_callbacks/extra.py", "import vllm", "tropism_callbacks is not"),
    ],
)
def test_a_wrong_import_is_found(
    tmp_path: Path, contract: str, file: str, line: str, message: str
) -> None:
    copy_sources(tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as module:
        module.write(f"\n{line}\n")
    result = lint_imports(tmp_path, contract)
    assert result.returncode == 1, result.stdout + result.stderr
    assert message in result.stdout


def test_vllm_engine_may_import_vllm(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    engine = tmp_path / "src/tropism/rollouts/vllm_engine.py"
    engine.write_text("import vllm\n", encoding="utf-8")
    result = lint_imports(tmp_path, "vllm")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", ["tropism", "tropism.measurements.records", "tropism.types"])
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    result = run_python(code, REPOSITORY)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
