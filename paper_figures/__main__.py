"""Redraws the figures: ``python -m paper_figures [--runs DIR] [--only NAME]``.

Without ``--runs`` the committed CSVs under ``data/`` are drawn, so that a clone needs no run; with
it they are first collected anew from the runs in DIR. Needs neither torch nor a network.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from paper_figures import style

ROOM = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("fig_") for path in ROOM.glob("fig_*.py"))


def main(arguments: list[str] | None = None, *, output: Path = ROOM) -> None:
    """Draw each figure as PDF and PNG below ``output / "figures"``."""
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    parser.add_argument("--runs", type=Path, help="collect the data from the runs in this folder")
    parser.add_argument("--only", choices=NAMES, help="this figure alone")
    options = parser.parse_args(arguments)
    (output / "data").mkdir(parents=True, exist_ok=True)
    (output / "figures").mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else NAMES:
        module = import_module(f"paper_figures.fig_{name}")
        csv = output / "data" / f"{name}.csv"
        if options.runs is not None:
            module.collect(options.runs).to_csv(csv, index=False, float_format="%.6g")
        elif not csv.exists():
            raise SystemExit(f"{csv} is missing: give the runs to collect it from with --runs.")
        style.save(module.make(csv), output / "figures" / name)
        print(f"{name}: {output / 'figures' / name}.png and .pdf, from {csv}")


if __name__ == "__main__":
    main()
