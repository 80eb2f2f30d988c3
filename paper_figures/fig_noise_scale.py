"""How many groups an update would need for its signal to equal its noise, and how many it has.

The scale is (raw - debiased) / debiased energy of all linears taken as one gradient (the simple
noise scale of 1812.06162, with a prompt's group for an example). A single reading finds no signal
at all about half of the time (debiased energy below 0), so energies are averaged over neighbouring
readings and seeds before the ratio is taken; intervals are of a bootstrap over those readings.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from paper_figures import style
from paper_figures.sources import by_model, records

NUM_BLOCKS = 3
NUM_RESAMPLES = 5_000


def collect(runs: Path) -> pd.DataFrame:
    """Energies of all linears at each reading, and the groups of a rollout."""
    parts = []
    for model, found in by_model(runs).items():
        rows = records(found, "pressure")
        by = ["run", "seed", "rollout", "probes_pooled"]
        sums = rows.groupby(by)[["raw_sq", "debiased_sq"]].sum().reset_index()
        config = yaml.safe_load((found[0].folder / "config.yaml").read_text(encoding="utf-8"))
        size = config["model"]["init_args"]["group_size"]
        groups = config["data"]["init_args"]["batch_size"] // size
        parts.append(sums.assign(model=model, group_size=size, groups=groups))
    return pd.concat(parts, ignore_index=True)


def noise_scale(raw: NDArray[np.float64], debiased: NDArray[np.float64]) -> NDArray[np.float64]:
    """Groups needed; infinite where no signal is found."""
    with np.errstate(divide="ignore"):
        return np.where(debiased > 0, (raw - debiased) / debiased, np.inf)


def make(csv: Path) -> Figure:
    """One panel for each model."""
    data = pd.read_csv(csv)
    models = list(data.groupby("model", sort=False))
    figure = style.figure(style.PAGE, 2.6)
    every = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    top = 10 ** np.ceil(np.log10(data["groups"].max() * 1e3))
    for axes, (model, rows) in zip(every, models, strict=True):
        _draw(axes, rows, top)
        axes.set_title(f"{model}, groups of {rows['group_size'].iloc[0]}, {style.seeds(rows)}")
    every[0].set_ylabel("groups")
    powers = range(round(np.log10(top)))
    every[0].set(yscale="log", ylim=(0.8, top * 1.6))
    labels = [*(str(10**i) for i in powers), "no signal"]
    every[0].set_yticks([10.0**i for i in (*powers, len(powers))], labels)
    every[0].minorticks_off()
    style.legend_below(figure, *every)
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, top: float) -> None:
    for i, (seed, part) in enumerate(rows.groupby("seed")):
        found = noise_scale(part["raw_sq"].to_numpy(), part["debiased_sq"].to_numpy())
        look = {**style.point(i), "alpha": 0.6, "mfc": "none"}
        look.pop("capsize")
        axes.plot(part["rollout"], np.minimum(found, top), label=f"seed {seed}", **look)
    edges = np.linspace(0, rows["rollout"].max() + 1, NUM_BLOCKS + 1)
    rng = np.random.default_rng(0)
    for j, (start, end) in enumerate(pairwise(edges)):
        block = rows[(rows["rollout"] >= start) & (rows["rollout"] < end)]
        energies = block[["raw_sq", "debiased_sq"]].to_numpy()
        drawn = rng.integers(0, len(block), (NUM_RESAMPLES, len(block)))
        low, high = np.quantile(noise_scale(*energies[drawn].mean(axis=1).T), (0.025, 0.975),
                                method="nearest")  # fmt: skip
        value = min(float(noise_scale(*energies.mean(axis=0))), top)
        axes.text((start + end) / 2, 1.1, f"{len(block)} readings", ha="center", fontsize=7)
        axes.fill_between([start, end], low, min(high, top), color="0.85", lw=0, zorder=0,
                          label=None if j else "its 95 % interval")  # fmt: skip
        axes.plot([start, end], [value] * 2, color="black", lw=2,
                  label=None if j else "needed, readings pooled")  # fmt: skip
    axes.axhline(rows["groups"].iloc[0], color=style.COLOURS[1], ls="--", label="groups used")
    axes.set_xlabel("rollout")
