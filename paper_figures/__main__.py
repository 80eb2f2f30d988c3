"""Redraws the figures: ``python -m paper_figures [--runs DIR] [--only NAME]``.

Figures of runs are drawn from the committed CSVs under ``data/``, so that a clone needs no run;
with ``--runs`` these are first collected anew from the runs in DIR. Figures of tables that the
repository carries (``SOURCE`` of a figure's file: benchmarks, studies) are always collected anew.
A figure without data is skipped, with a line that says which command makes them. Needs neither
torch nor a network.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from paper_figures import style
from paper_figures.sources import REPOSITORY, MissingDataError

ROOM = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("fig_") for path in ROOM.glob("fig_*.py"))


def redraw(name: str, *, runs: Path | None, output: Path) -> None:
    """Collect one figure's data where that is asked for, and draw it as PDF and PNG.

    Raises:
        MissingDataError: There is nothing to collect, or no CSV.
    """
    module = import_module(f"paper_figures.fig_{name}")
    csv, source = output / "data" / f"{name}.csv", getattr(module, "SOURCE", None)
    if source is not None or runs is not None:
        data = module.collect(REPOSITORY / source if source is not None else runs)
        data.to_csv(csv, index=False, float_format="%.6g", lineterminator="\n")
    elif not csv.exists():
        raise MissingDataError(f"{csv} is not there: collect it from your runs with --runs")
    style.redraw(module.make, csv, output / "figures" / name)
    print(f"{name}: {output / 'figures' / name}.png and .pdf, from {csv}")


def main(arguments: list[str] | None = None, *, output: Path = ROOM) -> None:
    """Draw each figure below ``output / "figures"``, from ``output / "data"``."""
    parser = argparse.ArgumentParser(
        prog="python -m paper_figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=Path, help="collect the data from the runs in this folder")
    parser.add_argument("--only", choices=NAMES, help="this figure alone")
    options = parser.parse_args(arguments)
    (output / "data").mkdir(parents=True, exist_ok=True)
    (output / "figures").mkdir(parents=True, exist_ok=True)
    for name in [options.only] if options.only else NAMES:
        try:
            redraw(name, runs=options.runs, output=output)
        except MissingDataError as missing:
            print(f"{name}: skipped, {missing}")


if __name__ == "__main__":
    main()
