"""AUC of a signal for damaged linears, and the table that keeps it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from tropism.measurements.layer_names import LinearSite

Cell = tuple[int, str, float, float | None]
"""(amount, name, value, value within kinds of module)"""

COLUMNS = ("part", "seed", "amount", "name", "value", "value_within_module")


def auc(values: Sequence[float], is_damaged: Sequence[bool]) -> float:
    """Chance that a damaged linear has a larger value than another one, ties counting half."""
    damaged = np.asarray(is_damaged)
    num, num_others = int(damaged.sum()), int((~damaged).sum())
    return float((rankdata(values)[damaged].sum() - num * (num + 1) / 2) / (num * num_others))


def within_module(values: Sequence[float], sites: Sequence[LinearSite]) -> list[float]:
    """Each value's rank among the layers of its own kind of module."""
    ranks = [0.0] * len(sites)
    for module in {site.module for site in sites}:
        chosen = [i for i, site in enumerate(sites) if site.module == module]
        for i, rank in zip(chosen, rankdata([values[i] for i in chosen]), strict=True):
            ranks[i] = float(rank)
    return ranks


class Results:
    """Rows of ``results.csv``, appended cell by cell; a cell that is there is not made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, part: str, seed: int) -> bool:
        return any(row["part"] == part and row["seed"] == str(seed) for row in self.rows)

    def add(self, part: str, seed: int, cells: Sequence[Cell]) -> None:
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            for amount, name, value, within in cells:
                row = {
                    "part": part,
                    "seed": str(seed),
                    "amount": str(amount),
                    "name": name,
                    "value": f"{value:.4f}",
                    "value_within_module": "" if within is None else f"{within:.4f}",
                }
                writer.writerow(row)
                self.rows.append(row)


def score(
    amount: int,
    signals: Mapping[str, Sequence[float | None]],
    sites: Sequence[LinearSite],
    damaged: frozenset[str],
) -> list[Cell]:
    """(amount, signal, AUC, AUC within modules); an undefined signal counts as the smallest."""
    is_damaged = [site.key in damaged for site in sites]
    cells: list[Cell] = []
    for name, found in signals.items():
        values = [-np.inf if value is None else value for value in found]
        within = auc(within_module(values, sites), is_damaged)
        cells.append((amount, name, auc(values, is_damaged), within))
    return cells
