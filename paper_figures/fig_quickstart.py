"""What `make quickstart` does: reward by component, held-out passes, and where the update went."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from tropism.measurements.records import read

PASS = "pass"


def collect(runs: Path) -> pd.DataFrame:
    """Long table of the quickstart runs below ``runs``: run, kind, x, series, value, low, high."""
    parts = []
    for folder in sorted((runs / "quickstart").glob("version_*")):
        evals = read(folder, "evals")
        if len(evals) < 2:  # not finished
            continue
        rewards, norms = read(folder, "rewards"), read(folder, "update_norms")
        last = norms[norms["rollout"] == norms["rollout"].max()]
        parts += [
            pd.DataFrame(
                {"kind": "reward", "x": rewards.rollout, "series": rewards.component,
                 "value": rewards["mean"]}
            ),
            pd.DataFrame(
                {"kind": "eval", "x": evals.rollout, "series": evals.benchmark,
                 "value": evals.value, "low": evals.ci_low, "high": evals.ci_high, "n": evals.n}
            ),
            pd.DataFrame(
                {"kind": "norm", "x": last.layer, "series": last.module,
                 "value": last.update_norm}
            ),
        ]  # fmt: skip
        for part in parts[-3:]:
            part.insert(0, "run", folder.name)
    if not parts:
        raise SystemExit(f"{runs} holds no finished quickstart run: `make quickstart` makes one.")
    return pd.concat(parts, ignore_index=True)


def make(csv: Path) -> Figure:
    """Left: sampled reward components. Middle: greedy held-out passes. Right: update norms."""
    data = pd.read_csv(csv)
    figure = style.figure(style.PAGE, 2.6)
    rewards, evals, norms = figure.subplots(1, 3, width_ratios=(3, 1.6, 2.4))
    _draw_rewards(rewards, data[data.kind == "reward"])
    _draw_evals(evals, data[data.kind == "eval"])
    _draw_norms(figure, norms, data[data.kind == "norm"])
    return figure


def _draw_rewards(axes, rows: pd.DataFrame) -> None:
    for i, (component, part) in enumerate(rows.groupby("series", sort=False)):
        by_rollout = part.groupby("x").value.agg(["mean", "min", "max"])
        colour = style.COLOURS[i]
        axes.plot(by_rollout["mean"], color=colour, ls=style.DASHES[i], label=component)
        axes.fill_between(
            by_rollout.index, by_rollout["min"], by_rollout["max"], color=colour, alpha=0.15, lw=0
        )
    num_runs = rows.run.nunique()
    axes.set(xlabel="rollout", ylabel="mean of 32 samples", ylim=(0, 1.02))
    axes.set_title(f"reward while training, {num_runs} seed{'s' * (num_runs > 1)} (mean, range)")
    axes.legend(fontsize=7)


def _draw_evals(axes, rows: pd.DataFrame) -> None:
    for i, (_, part) in enumerate(rows.groupby("run")):
        for j, (_, row) in enumerate(part.iloc[[0, -1]].iterrows()):
            axes.errorbar(
                j + (i - 1) * 0.12,
                row.value,
                yerr=[[row.value - row.low], [row.high - row.value]],
                fmt="os^vD"[i % 5],
                color=style.COLOURS[i],
                ms=4,
                capsize=2,
            )
    axes.set(xticks=[0, 1], xticklabels=["base", "tuned"], xlim=(-0.5, 1.5), ylim=(0, 1.02))
    axes.set_title(f"held-out pass\n(n = {rows.n.iloc[0]:.0f}, 95 %)")


def _draw_norms(figure: Figure, axes, rows: pd.DataFrame) -> None:
    order = list(dict.fromkeys(rows.series))
    table = rows.pivot_table(index="x", columns="series", values="value")[order]
    image = axes.imshow(table, cmap="cividis", aspect="auto", origin="lower", vmin=0)
    axes.set_xticks(
        range(len(order)),
        [name.removesuffix("_proj") for name in order],
        rotation=45,
        ha="right",
    )
    axes.set(ylabel="layer")
    axes.set_title(r"update $\|W_t - W_0\| / \|W_0\|$")
    figure.colorbar(image, ax=axes)
