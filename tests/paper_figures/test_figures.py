"""A newcomer redraws every figure from what is committed, and the gallery shows them all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paper_figures import __main__ as figures
from paper_figures import style
from paper_figures.fig_noise_scale import noise_scale
from paper_figures.fig_rank_stability import overlap
from paper_figures.sources import MissingDataError, finished
from PIL import Image

ROOM = figures.ROOM
COMMITTED = sorted(path.stem for path in (ROOM / "data").glob("*.csv"))
GALLERY = (ROOM / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All figures in a fresh process that may not load torch; the folder, and what it printed."""
    folder = tmp_path_factory.mktemp("figures")
    shutil.copytree(ROOM / "data", folder / "data")
    code = (
        "import sys; from pathlib import Path; from paper_figures.__main__ import main; "
        "main([], output=Path(sys.argv[1])); "
        "print('LOADED', sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, cwd=ROOM.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_everything_is_redrawn_without_torch(redrawn: tuple[Path, str]):
    folder, told = redrawn
    assert "LOADED []" in told
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert drawn == {path.stem for path in (folder / "figures").glob("*.pdf")}
    assert set(COMMITTED) <= drawn
    skipped = re.findall(r"^(\w+): skipped, .*`(?:make|python) .+`", told, re.MULTILINE)
    assert sorted([*skipped, *drawn]) == figures.NAMES


def test_tables_are_the_committed_ones_byte_for_byte(redrawn: tuple[Path, str]):
    folder, _ = redrawn
    for name in COMMITTED:
        fresh = (folder / "data" / f"{name}.csv").read_bytes()
        assert fresh == (ROOM / "data" / f"{name}.csv").read_bytes(), name


def test_pictures_are_the_committed_ones(redrawn: tuple[Path, str]):
    folder, _ = redrawn
    for name in COMMITTED:
        with (
            Image.open(folder / "figures" / f"{name}.png") as fresh,
            Image.open(ROOM / "figures" / f"{name}.png") as committed,
        ):
            assert fresh.size == committed.size, name
            pair = [np.asarray(one.convert("RGB"), dtype=float) for one in (fresh, committed)]
        assert np.abs(pair[0] - pair[1]).mean() < 1.0, f"{name}: `make figures` and commit it"


def test_drawing_again_gives_the_same_bytes(redrawn: tuple[Path, str], tmp_path: Path):
    folder, _ = redrawn
    for name in ("merge_gap", "plan_timeline"):
        module = __import__(f"paper_figures.fig_{name}", fromlist=["make"])
        style.redraw(module.make, ROOM / "data" / f"{name}.csv", tmp_path / name)
        for suffix in (".png", ".pdf"):
            first = (folder / "figures" / name).with_suffix(suffix).read_bytes()
            assert (tmp_path / name).with_suffix(suffix).read_bytes() == first, name + suffix


def test_what_is_committed_is_small_and_names_its_runs():
    files = [*(ROOM / "data").glob("*.csv"), *(ROOM / "figures").glob("*.png")]
    assert [path.name for path in files if path.stat().st_size > style.MAX_PNG_BYTES] == []
    assert sum(path.stat().st_size for path in (ROOM / "figures").iterdir()) < 4 * 1024**2
    for name in COMMITTED:
        assert pd.read_csv(ROOM / "data" / f"{name}.csv")["run"].notna().any(), name


def test_the_gallery_lists_all_figures_and_no_others():
    assert sorted(re.findall(r"!\[\]\(figures/(\w+)\.png\)", GALLERY)) == COMMITTED
    assert sorted(re.findall(r"^\| `(\w+)` ", GALLERY, re.MULTILINE)) == figures.NAMES


# -- where data come from -----------------------------------------------------------------------


def write_run(folder: Path, *, seed: int, started: str, status: str = "finished") -> None:
    folder.mkdir(parents=True)
    git = '{"sha": "0123456789", "dirty": true}'
    (folder / "run.json").write_text(
        f'{{"seed": {seed}, "started": "{started}", "status": "{status}", "git": {git}}}'
    )


def test_the_newest_finished_run_of_each_seed_is_taken(tmp_path: Path):
    write_run(tmp_path / "loop" / "version_0", seed=1, started="2026-12-02T10")
    write_run(tmp_path / "loop" / "version_1", seed=1, started="2026-12-02T11")
    write_run(tmp_path / "loop" / "version_2", seed=1, started="2026-12-02T12", status="running")
    write_run(tmp_path / "loop" / "version_10", seed=0, started="2026-12-02T09")
    found = finished(tmp_path, "loop", command="make loop")
    assert [run.name for run in found] == ["loop/version_10@0123456+", "loop/version_1@0123456+"]


def test_no_runs_skip_a_figure_and_leave_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(MissingDataError, match="`make loop` makes one"):
        finished(tmp_path, "loop", command="make loop")
    figures.main(["--runs", str(tmp_path), "--only", "decisions"], output=tmp_path)
    assert "decisions: skipped" in capsys.readouterr().out
    assert not list((tmp_path / "figures").iterdir())


# -- small computations -------------------------------------------------------------------------


def test_overlap_of_the_top_fifth():
    one = pd.Series(range(10), index=list("abcdefghij"))
    assert overlap(one, one) == 1.0
    assert overlap(one, -one) == 0.0
    other = one.copy()
    other["a"] = 99  # now i leaves the top two
    assert overlap(one, other) == 0.5


def test_noise_scale_is_infinite_without_signal():
    found = noise_scale(np.array([10.0, 10.0, 10.0]), np.array([2.0, 0.0, -1.0]))
    assert found.tolist() == [4.0, np.inf, np.inf]
