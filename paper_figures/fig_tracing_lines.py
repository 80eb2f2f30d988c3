"""The tracing by layer, a line for each role of the token: which differences are sure?

Bands are 95 % bootstrap intervals over facts.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style, tracing

KINDS = tuple(tracing.TITLES)
collect = tracing.collect


def make(csv: Path) -> Figure:
    """A panel for each kind of restoring, a line for each role of the token."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.8)
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        own = data[data["kind"] == kind]
        axes.axhline(0, color="0.6", lw=0.8)
        for i, (role, rows) in enumerate(own.groupby("role", sort=False)):
            label = f"{role} ({rows['num_facts'].iloc[0]})"
            axes.plot(rows["layer"], rows["effect"], label=label, **style.line(i))
            band = {"color": style.COLOURS[i], "alpha": 0.15, "lw": 0}
            axes.fill_between(rows["layer"], rows["low"], rows["high"], **band)
        axes.set(title=tracing.title(data, kind), xlabel="layer")
    panels[0].set_ylabel("average indirect effect\n(mean over facts, 95 %)")
    figure.suptitle(tracing.facts(data), fontsize=8)
    style.legend_below(figure, panels[0], num_columns=6)
    return figure
