"""One look for all figures: readable in grey, by any colour vision, in a two-column paper."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLUMN = 3.4
"""Width of one column of the paper, in inches."""
PAGE = 7.0
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's colours: distinct to every colour vision. Lines differ in dashes as well."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def figure(width: float, height: float) -> Figure:
    """An empty figure of the paper's look; touches no pyplot state."""
    matplotlib.rcParams.update(
        {
            "font.size": 8,
            "axes.titlesize": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "pdf.fonttype": 42,
        }
    )
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn


def save(drawn: Figure, stem: Path) -> None:
    """Write ``stem.pdf`` and ``stem.png``, without dates: same data, same bytes."""
    drawn.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})
    drawn.savefig(stem.with_suffix(".png"), dpi=200, metadata={"Software": None})
