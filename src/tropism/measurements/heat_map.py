"""Layer x module images: one quantity per linear, as a matrix and as a drawing. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tropism.measurements.layer_names import LinearSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

OUTSIDE = "other"
"""Label of the row for linears outside the decoder layers."""

MAX_ANNOTATED_ROWS = 16


def layer_by_module(
    sites: Sequence[LinearSite], values: Sequence[float | None]
) -> tuple[NDArray[np.float64], list[str], list[str]]:
    """Arrange one value per site as a matrix.

    Returns:
        (num_layers, num_modules) matrix, NaN where the model has no such linear or the value is
        None; row labels, layer 0 first; column labels in the order of the model.
    """
    layers: list[int | None] = [*sorted({s.layer for s in sites if s.layer is not None})]
    if any(site.layer is None for site in sites):
        layers.append(None)
    modules = list(dict.fromkeys(site.module for site in sites))
    matrix = np.full((len(layers), len(modules)), np.nan)
    for site, value in zip(sites, values, strict=True):
        if value is not None:
            matrix[layers.index(site.layer), modules.index(site.module)] = value
    return matrix, [OUTSIDE if layer is None else str(layer) for layer in layers], modules


def draw_heat_map(
    matrix: NDArray[np.float64],
    layers: Sequence[str],
    modules: Sequence[str],
    *,
    title: str,
) -> Figure:
    """Draw the matrix with one colour scale from 0 to its maximum; layer 0 is at the bottom.

    The colours (cividis) read the same with any colour vision and in grey; missing cells are
    hatched white. Small images carry their numbers. Touches no pyplot state.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    num_layers, num_modules = matrix.shape
    height = min(14.0, max(2.6, 0.24 * num_layers + 1.6))
    figure = Figure(
        figsize=(max(4.5, 0.8 * num_modules + 2.2), height), dpi=100, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.patch.set(hatch="xx", edgecolor="0.85", facecolor="white")
    finite = matrix[np.isfinite(matrix)]
    top = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    image = axes.imshow(
        matrix,
        cmap=matplotlib.colormaps["cividis"],
        vmin=0.0,
        vmax=top,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
    every = max(1, -(-num_layers // 32))
    axes.set_yticks(range(0, num_layers, every), list(layers)[::every])
    axes.set_xticks(range(num_modules), list(modules), rotation=35, ha="right")
    axes.set_ylabel("layer")
    axes.set_title(title)
    scientific = ScalarFormatter()
    scientific.set_powerlimits((-2, 3))
    figure.colorbar(image, ax=axes, format=scientific)
    if num_layers <= MAX_ANNOTATED_ROWS:
        for (row, column), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                shade = "black" if value > 0.55 * top else "white"
                axes.text(column, row, f"{value:.1e}", ha="center", va="center", fontsize=7,
                          color=shade)  # fmt: skip
    return figure


def render(figure: Figure) -> NDArray[np.uint8]:
    """(height, width, 3) pixels of a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba(), dtype=np.uint8)
    return pixels[..., :3].copy()
