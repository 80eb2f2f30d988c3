"""The published data, where this machine has them."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> str:
    """Folder of the benchmarks: ``TROPISM_DATA``, or ``shared/data`` beside the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TROPISM_DATA") or beside)
    if not folder.is_dir():
        pytest.skip("needs the benchmarks' data: set TROPISM_DATA to their folder")
    return str(folder)
