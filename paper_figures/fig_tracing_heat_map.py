"""Where SmolLM2 recalls facts: what restoring each layer and token brings back, in the mean.

Noise on the subject takes the answer away; the colour is how much of its probability comes back
when one layer's output, or the MLP or attention outputs of a window about it, are put back.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style, tracing

KINDS = tuple(tracing.TITLES)


def collect(runs: Path) -> pd.DataFrame:
    """The averages of `tropism trace`, without intervals."""
    return tracing.collect(runs).drop(columns=["low", "high"])


def make(csv: Path) -> Figure:
    """A map for each kind of restoring, on one scale."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 3.4)
    panels = figure.subplots(1, len(KINDS), sharey=True)
    low, high = min(0.0, float(data["effect"].min())), float(data["effect"].max())
    for axes, kind in zip(panels, KINDS, strict=True):
        own = data[data["kind"] == kind]
        table = own.pivot_table(index="layer", columns="role", values="effect", sort=False)
        image = style.heat_map(axes, table.sort_index(), vmin=low, vmax=high)
        axes.set_title(tracing.title(data, kind))
    for axes in panels[1:]:
        axes.set_ylabel("")
    figure.colorbar(image, ax=panels, label="average indirect effect", aspect=30)
    figure.suptitle(tracing.facts(data), fontsize=8)
    return figure
