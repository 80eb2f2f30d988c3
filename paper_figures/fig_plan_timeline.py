"""What `make loop` decides: step size and state of every linear, rollout by rollout."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import loops, records
from tropism.adaptation.plan_timeline import draw_plan_timeline
from tropism.lora.plan import plan_from_rows

COLUMNS = ["run", "seed", "rollout", "layer", "module", "state", "rank", "lr_scale"]


def collect(runs: Path) -> pd.DataFrame:
    """The plans of the run of `make loop` with the lowest seed, and where it ended."""
    first = loops(runs)[:1]
    end = records(first, "steps")["rollout"].max() + 1
    return records(first, "plans")[COLUMNS].assign(end=end)


def make(csv: Path) -> Figure:
    """The timeline."""
    rows = pd.read_csv(csv)
    plans = [
        (int(rollout), plan_from_rows(part.to_dict("records")))
        for rollout, part in rows.groupby("rollout", sort=True)
    ]
    figure = draw_plan_timeline(plans, end=int(rows["end"].iloc[0]))
    figure.set_size_inches(style.PAGE, 2.4)
    return figure
