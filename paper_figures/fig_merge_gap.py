"""How far the policy that samples is from the one that trains (`benchmarks/merge_gap.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import table_of

SOURCE = "benchmarks/results/merge_gap.json"
LABELS = {"un-merged": "un-merged (trainer)", "nearest bf16": "merged, nearest bf16",
          "stochastic bf16": "merged, stochastic bf16", "fp32": "merged in fp32",
          "engine, while sampling": "engine, while sampling"}  # fmt: skip


def collect(source: Path) -> pd.DataFrame:
    """A row for each way of showing the weights to the sampler."""
    command = "python benchmarks/merge_gap.py --run RUN"
    found = json.loads(table_of(source, command=command).read_text(encoding="utf-8"))
    run = "/".join(Path(found["run"]).parts[-2:])
    rows = [{"run": run, "way": way, **gaps} for way, gaps in found["ways"].items()]
    return pd.DataFrame(rows).assign(tokens=found["tokens"])


def make(csv: Path) -> Figure:
    """Gap to the trainer and to the same policy in fp32."""
    data = pd.read_csv(csv)
    figure = style.figure(style.COLUMN, 2.3)
    axes = figure.subplots()
    look: dict[str, Any] = {"height": 0.36, "edgecolor": "white"}
    axes.barh(data.index - 0.19, data["mean_gap_to_trainer"], label="to the trainer",
              color=style.COLOURS[0], **look)  # fmt: skip
    axes.barh(data.index + 0.19, data["mean_gap_to_fp32"], label="to the policy in fp32",
              color=style.COLOURS[5], hatch=style.HATCHES[1], **look)  # fmt: skip
    axes.set_yticks(data.index, [LABELS.get(way, way) for way in data["way"]])
    axes.invert_yaxis()
    axes.set_xlabel("mean gap, nats a token")
    num = data["tokens"].iloc[0]
    figure.suptitle(f"gap of log-probabilities, {num} sampled tokens", fontsize=8)
    style.legend_below(figure, axes)
    return figure
