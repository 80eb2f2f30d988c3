"""Every config of the repository parses against the real signatures."""

from pathlib import Path

import pytest
import yaml

from tropism.cli import main

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def is_config(path: Path) -> bool:
    """One of `fit`: not a sweep, nor settings that sweeps share, nor a config of `trace`."""
    return "class_path" in yaml.safe_load(path.read_text(encoding="utf-8")).get("model", {})


CONFIGS = [path for path in sorted(EXPERIMENTS.rglob("*.yaml")) if is_config(path)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_parses_and_says_what_it_asks(path, capsys):
    assert path.read_text(encoding="utf-8").startswith("# "), "the first line says what it asks"
    with pytest.raises(SystemExit) as exit_info:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit_info.value.code in (0, None), capsys.readouterr().err
