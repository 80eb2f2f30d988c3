"""What `make loop` decides: step size and state of every linear, rollout by rollout."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from tropism.adaptation.plan_timeline import draw_plan_timeline
from tropism.lora.plan import plan_from_rows
from tropism.measurements.records import read

COLUMNS = ["rollout", "layer", "module", "state", "rank", "lr_scale"]


def collect(runs: Path) -> pd.DataFrame:
    """The plans of the newest run of `make loop` below ``runs``, and where it ended."""
    for folder in sorted((runs / "loop").glob("version_*"), reverse=True):
        plans, steps = read(folder, "plans"), read(folder, "steps")
        if len(plans) and len(steps):
            return plans[COLUMNS].assign(end=steps["rollout"].max() + 1, run=folder.name)
    raise SystemExit(f"{runs} holds no run of the loop: `make loop` makes one.")


def make(csv: Path) -> Figure:
    """The timeline."""
    rows = pd.read_csv(csv)
    plans = [
        (int(rollout), plan_from_rows(part.to_dict("records")))
        for rollout, part in rows.groupby("rollout", sort=True)
    ]
    return draw_plan_timeline(plans, end=int(rows["end"].iloc[0]))
