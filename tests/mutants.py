"""Puts each fault of ``mutants.toml`` back into a copy of the source: does a test notice?

    python tests/mutants.py [--only N]

For each mutant, the tests marked ``fault(N)`` run on the copy and have to fail. The working tree is
only read. Exits with 1 where a mutant survives, breaks the copy so that no test can run, or no
longer applies; or where the tests fail on the copy as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "src",
    "callbacks",
    "tests",
    "experiments",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "README.md",
    "CONTRIBUTING.md",
    "LICENSE",
)  # fmt: skip
LIMIT_SECONDS = 600
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that no test ran


@dataclass(frozen=True)
class Mutant:
    """One change of the source: ``old``, which occurs once in ``file``, becomes ``new``."""

    fault: int
    file: str
    what: str
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The changed text.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"fault {self.fault}: {self.old!r} occurs {count} times in {self.file}: "
                "mend tests/mutants.toml."
            )
        return text.replace(self.old, self.new)


def load(root: Path = ROOT) -> tuple[list[int], list[Mutant]]:
    """The numbers that need a test and a mutant, and all mutants."""
    content = tomllib.loads((root / "tests/mutants.toml").read_text(encoding="utf-8"))
    return content["faults"], [Mutant(**entry) for entry in content["mutant"]]


def marked_files(root: Path = ROOT) -> dict[int, list[str]]:
    """Fault number -> the test files that have a test of it."""
    found: dict[int, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        numbers = re.findall(r"mark\.fault\((\d+)\)", path.read_text(encoding="utf-8"))
        for number in sorted({int(n) for n in numbers}):
            found.setdefault(number, []).append(str(path.relative_to(root)))
    return found


def stale(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Why each mutant that no longer applies does not."""
    problems = []
    for mutant in mutants:
        try:
            mutant.applied_to((root / mutant.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return problems


class Copy:
    """A copy of the repository in ``folder``, in which tests run on the copied packages."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        unneeded = shutil.ignore_patterns("__pycache__", "*_cache", "runs")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=unneeded)
            else:
                shutil.copy(source, self.root / name)
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(self.root / name) for name in ("src", "callbacks")),
            # A cache of bytecode can take a mutant for the file of the same size and second.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._require_own_packages()

    def _require_own_packages(self) -> None:
        code = (
            "import tropism, tropism_callbacks as c; print(tropism.__file__, c.__file__, sep='\\n')"
        )
        result = self._python("-c", code)
        for line in result.stdout.splitlines():
            if not Path(line).resolve().is_relative_to(self.root):
                raise RuntimeError(f"the copy in {self.root} imports {line}, not its own packages.")
        if result.returncode != 0 or not result.stdout:
            raise RuntimeError(f"the copy in {self.root} cannot be imported:\n{result.stderr}")

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )

    def test(self, faults: Collection[int]) -> subprocess.CompletedProcess[str]:
        """Run the tests of these faults, up to the first that fails."""
        marked = marked_files(self.root)
        files = sorted({file for fault in faults for file in marked[fault]})
        chosen = [argument for fault in faults for argument in ("--fault", str(fault))]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not long"]
        return self._python("-m", "pytest", *options, *chosen, *files)

    def verdict(self, mutant: Mutant) -> tuple[str, str]:
        """``killed``, ``SURVIVED`` or ``BROKEN``, and by what."""
        path = self.root / mutant.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied_to(original), encoding="utf-8")
        try:
            result = self.test([mutant.fault])
        except subprocess.TimeoutExpired:
            return "killed", f"ran longer than {LIMIT_SECONDS} s"
        finally:
            path.write_text(original, encoding="utf-8")
        failed = re.search(r"^FAILED \S+::(\w+)", result.stdout, re.MULTILINE)
        if result.returncode == FAILED and failed is not None:
            return "killed", failed[1]
        if result.returncode == PASSED:
            return "SURVIVED", "no test"
        return "BROKEN", f"no test could run\n{result.stdout[-2000:]}{result.stderr[-2000:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=int, metavar="N", help="only the mutants of fault N")
    only = parser.parse_args(arguments).only
    _, mutants = load()
    chosen = [mutant for mutant in mutants if only in (None, mutant.fault)]
    if not chosen:
        known = sorted({mutant.fault for mutant in mutants})
        print(f"--only {only}: no mutant has that number; there are {known}.", file=sys.stderr)
        return 1
    if problems := stale(chosen):
        print("\n".join(problems), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        result = copy.test(sorted({mutant.fault for mutant in chosen}))
        if result.returncode != PASSED:
            print(result.stdout, "The tests fail without any mutant.", sep="\n", file=sys.stderr)
            return 1
        num_killed = 0
        for mutant in chosen:
            word, by = copy.verdict(mutant)
            print(f"fault {mutant.fault:<3} {word:<8}  {mutant.what} [{by}]", flush=True)
            num_killed += word == "killed"
    print(f"killed {num_killed} / total {len(chosen)}")
    return 0 if num_killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
