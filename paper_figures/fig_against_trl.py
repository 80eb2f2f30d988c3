"""One GRPO step beside TRL 1.16 on the same work (`make bench`): time by phase, and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.sources import table_of

SOURCE = "benchmarks/results/against_trl.json"
PHASES = {"rollout": "sampling", "train": "update", "rest": "rest (at most {:.2f} s)"}


def collect(source: Path) -> pd.DataFrame:
    """A row for each side, fastest first."""
    found = json.loads(table_of(source, command="make bench").read_text(encoding="utf-8"))
    rows = [
        {
            "run": f"against_trl {found['date'][:10]} {found['commit']}",
            "side": name,
            **side["seconds"],
            "megabytes": side["megabytes"],
            "num_steps": side["num_steps"],
            "tokens": sum(found["lengths"]),
            "machine": f"{found['machine']}, {found['threads']} threads",
        }
        for name, side in found["sides"].items()
    ]
    return pd.DataFrame(rows).sort_values("step", ignore_index=True)


def make(csv: Path) -> Figure:
    """Left: seconds of a step. Right: peak memory."""
    data = pd.read_csv(csv)
    data["rest"] = (data["step"] - data["rollout"] - data["train"]).clip(lower=0)
    figure = style.figure(style.PAGE, 1.9)
    seconds, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
    left = pd.Series(0.0, index=data.index)
    for i, (phase, label) in enumerate(PHASES.items()):
        look = {"color": style.COLOURS[i], "edgecolor": "white", "hatch": style.HATCHES[i]}
        seconds.barh(
            data.index,
            data[phase],
            left=left,
            label=label.format(data[phase].max()),
            height=0.65,
            **look,
        )
        left += data[phase]
    memory.barh(data.index, data["megabytes"], color=style.COLOURS[4], height=0.65)
    for y, row in data.iterrows():
        seconds.text(row["step"], y, f" {row['step']:.1f} s", va="center", fontsize=7)
        memory.text(row["megabytes"], y, f" {row['megabytes']:.0f} MB", va="center", fontsize=7)
    names = [f"{side} (n = {num})" for side, num in zip(data["side"], data["num_steps"],
                                                        strict=True)]  # fmt: skip
    seconds.set_yticks(data.index, names)
    seconds.invert_yaxis()
    seconds.set(xlabel="seconds, median of n steps", xlim=(0, data["step"].max() * 1.12))
    seconds.set_title(f"one step of {data['tokens'].iloc[0]} completion tokens")
    memory.set(xlabel="peak resident memory, MB", xlim=(0, data["megabytes"].max() * 1.3))
    memory.set_title(data["machine"].iloc[0])
    seconds.legend(loc="upper right")
    return figure
