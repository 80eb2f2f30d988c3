"""Faults of the disk: which are explained, which pass as they are."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tropism.measurements.disk import explained_disk_full, require_writable


def test_a_new_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    require_writable(tmp_path / "runs" / "new")
    assert list((tmp_path / "runs" / "new").iterdir()) == []


def test_a_file_in_the_way_is_refused_with_the_folder_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(ValueError, match=r"runs/new cannot be written to .*save_dir"):
        require_writable(tmp_path / "runs" / "new")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_explained(code: int) -> None:
    message = r"run folder runs/x is full.*free some space"
    with pytest.raises(OSError, match=message) as caught, explained_disk_full("runs/x"):
        raise OSError(code, "full", "runs/x/records/steps.jsonl")
    assert caught.value.errno == code
    assert caught.value.filename == "runs/x/records/steps.jsonl"


def test_a_really_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with pytest.raises(OSError, match="is full"), explained_disk_full("runs/x"):
        Path("/dev/full").write_text("x")


def test_other_errors_pass_unchanged() -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(PermissionError) as caught, explained_disk_full("runs/x"):
        raise error
    assert caught.value is error
