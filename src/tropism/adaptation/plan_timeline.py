"""The plan over time: a panel for each module, layers upward, rollouts to the right.

Colour is the step size (white 1, blue less, red more) where LoRA trains, grey where it is kept as
it is, hatched where it is off. Needs no torch: callbacks draw it live, figures from the records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tropism.lora.plan import Plan

RANGE = 4.0
"""Step sizes from 1 / RANGE to RANGE have a colour of their own."""
KEPT, OFF = "0.72", "0.93"


def draw_plan_timeline(plans: Sequence[tuple[int, Plan]], *, end: int) -> Figure:
    """The figure.

    Args:
        plans: (rollout from which it was in force, plan), ascending; the first at rollout 0.
            Linears outside the layers are left out.
        end: Rollouts done.
    """
    first = [entry for entry in plans[0][1] if entry.layer is not None]
    modules = list(dict.fromkeys(entry.module for entry in first))
    num_layers = 1 + max(entry.layer or 0 for entry in first)
    starts = [rollout for rollout, _ in plans]
    edges = np.array([*starts, max(end, starts[-1] + 1)], dtype=float)
    figure = Figure(figsize=(1.5 + 1.25 * len(modules), 2.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(modules), sharey=True))
    mesh = None
    for axis, module in zip(axes, modules, strict=True):
        scale, kept = _matrices(plans, module, num_layers)
        axis.set_facecolor(OFF)
        layers = np.arange(num_layers + 1) - 0.5
        axis.pcolormesh(edges, layers, kept, cmap="gray", vmin=0, vmax=1)
        mesh = axis.pcolormesh(edges, layers, scale, cmap="RdBu_r", norm=LogNorm(1 / RANGE, RANGE))
        for start in starts[1:]:
            axis.axvline(start, color="0.35", linewidth=0.4)
        axis.set_title(module.rsplit(".", 1)[-1].removesuffix("_proj"), fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel("layer", fontsize=8)
    figure.supxlabel("rollout", fontsize=8)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=list(axes), pad=0.01, ticks=[0.25, 0.5, 1, 2, 4])
        bar.ax.set_yticklabels(["¼", "½", "1", "2", "4"], fontsize=7)
        bar.minorticks_off()
        bar.set_label("step size", fontsize=8)
    figure.legend(
        handles=[Patch(color=KEPT, label="kept"), Patch(facecolor=OFF, ec="0.6", label="off")],
        fontsize=7,
        loc="outside lower right",
        ncols=2,
        frameon=False,
    )
    return figure


def _matrices(
    plans: Sequence[tuple[int, Plan]], module: str, num_layers: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[layers, plans] step sizes where it trains, and the grey of KEEP; NaN elsewhere."""
    scale = np.full((num_layers, len(plans)), np.nan)
    kept = np.full((num_layers, len(plans)), np.nan)
    for column, (_, plan) in enumerate(plans):
        for entry in plan:
            if entry.module != module or entry.layer is None:
                continue
            if entry.state == "TRAIN":
                scale[entry.layer, column] = np.clip(entry.lr_scale, 1 / RANGE, RANGE)
            elif entry.state == "KEEP":
                kept[entry.layer, column] = float(KEPT)
    return scale, kept
