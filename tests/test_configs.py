"""Every config of the repository parses against the real signatures."""

from pathlib import Path

import pytest

from tropism.cli import main

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_config_parses_and_says_what_it_asks(path, capsys):
    assert path.read_text(encoding="utf-8").startswith("# "), "the first line says what it asks"
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit_info.value.code in (0, None), capsys.readouterr().err
