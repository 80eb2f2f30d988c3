"""One look for all figures: readable in grey, by any colour vision, in a two-column paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

COLUMN = 3.4
"""Width of one column of the paper, in inches."""
PAGE = 7.0
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's colours: distinct to every colour vision. Lines differ in dashes as well."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "////", "....", "xxxx")
LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "hatch.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
}
DPI = 200
MAX_PNG_BYTES = 150 * 1024
"""Of one picture in the repository."""


def figure(width: float, height: float) -> Figure:
    """An empty figure; touches no pyplot state."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn


def redraw(make: Callable[[Path], Figure], csv: Path, stem: Path) -> None:
    """Write ``make(csv)`` as ``stem.pdf`` and ``.png``, without dates: same data, same bytes."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        drawn = make(csv)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")  # laid out once, for both files
        drawn.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})
        png = BytesIO()
        drawn.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    if len(png.getvalue()) > MAX_PNG_BYTES:
        png = _with_palette(png)
    stem.with_suffix(".png").write_bytes(png.getvalue())


def _with_palette(png: BytesIO) -> BytesIO:
    """The picture in 256 colours, a third as large; the PDF keeps every one."""
    few = BytesIO()
    with Image.open(png) as pixels:
        pixels.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE
        ).save(few, format="png", optimize=True)
    return few


def line(i: int, *, marker: bool = False) -> dict[str, Any]:
    """Colour and dashes of the i-th line, and its marker where points are few."""
    look: dict[str, Any] = {"color": COLOURS[i % 7], "ls": DASHES[i % 7]}
    return {**look, "marker": MARKERS[i % 7]} if marker else look


def point(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th series of single points with error bars."""
    return {"color": COLOURS[i % 7], "marker": MARKERS[i % 7], "ls": "", "capsize": 2, "ms": 4}


def error(value: float, low: float, high: float) -> list[list[float]]:
    """``yerr`` or ``xerr`` of one point from its interval."""
    return [[value - low], [high - value]]


def short(module: str) -> str:
    """``self_attn.q_proj`` and ``q_proj`` are ``q``."""
    return module.rsplit(".", 1)[-1].removesuffix("_proj")


def layer_map(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """[layers, modules] means of ``column`` over all else, modules in the order of the model."""
    modules = list(dict.fromkeys(rows["module"]))
    return rows.pivot_table(index="layer", columns="module", values=column, dropna=False)[modules]


def heat_map(
    axes: Axes, table: pd.DataFrame, *, hatched: pd.DataFrame | None = None, **options: Any
) -> AxesImage:
    """Layers upward, modules to the right; ``hatched`` marks cells that say nothing."""
    values = table.to_numpy(dtype=float)
    look = {"cmap": "cividis", "aspect": "auto", "origin": "lower", **options}
    image = axes.imshow(values, interpolation="nearest", **look)
    if hatched is not None:
        for row, column in np.argwhere(hatched.to_numpy(dtype=bool)):
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(
                Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor="0.8", linewidth=0)
            )
    axes.set_xticks(range(len(table.columns)), [short(name) for name in table.columns], rotation=90)
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(length=2)
    axes.spines[:].set_visible(False)
    return image


def mean_and_range(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, i: int, *, label: str, marker: bool = False
) -> None:
    """Mean over seeds as a line, all that they reach as a band."""
    over = rows.groupby(x)[y].agg(["mean", "min", "max"])
    every = max(1, len(over) // 10)
    axes.plot(over.index, over["mean"], label=label, markevery=every, **line(i, marker=marker))
    axes.fill_between(over.index, over["min"], over["max"], color=COLOURS[i % 7], alpha=0.15, lw=0)


def legend_below(drawn: Figure, *of: Axes, num_columns: int | None = None) -> None:
    """One legend under the whole figure, of what these axes hold; each label once."""
    entries: dict[str, Any] = {}
    for axes in of:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    columns = num_columns or len(entries)
    drawn.legend(entries.values(), entries, loc="outside lower center", ncols=columns)


def seeds(rows: pd.DataFrame) -> str:
    """``3 seeds``."""
    num = rows["seed"].nunique()
    return f"{num} seed{'s' * (num != 1)}"


def categories(axes: Axes, names: Sequence[str], **options: Any) -> None:
    """Names along x, half a step of room at both ends."""
    axes.set_xticks(range(len(names)), list(names), **options)
    axes.set_xlim(-0.6, len(names) - 0.4)
