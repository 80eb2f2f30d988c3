"""The cells of a sweep: one run each, of an arm, at a point of its grid, with a seed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from .specification import Arm, Sweep, fill, merged, placeholders

# Columns of the index and of results that a setting of the grid must not take the name of.
RESERVED = {"arm", "config", "seed", "status", "arm_status", "hash", "folder", "commit"}
RESERVED |= {"seconds", "started", "ended"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One run.

    Args:
        arm: Its arm.
        seed: Everything random derives from it.
        grid: Dotted setting -> value.
        labels: Short name of the setting -> its value as text, or number; for tables and names.
        refers: ``run:ARM`` or ``run:ARM:other_seed`` -> key of the cell meant.
        after: Keys of cells that must have finished before.
    """

    arm: Arm
    seed: int
    grid: Mapping[str, Any]
    labels: Mapping[str, Any]
    refers: Mapping[str, str]
    after: tuple[str, ...]

    @property
    def name(self) -> str:
        """``learning_rate=0.001,seed=0``: its folder below that of the arm."""
        return _name(self.labels, self.seed)

    @property
    def key(self) -> str:
        """``arm/learning_rate=0.001,seed=0``."""
        return f"{self.arm.name}/{self.name}"

    def settings(self, folder: Callable[[str], str]) -> dict[str, Any]:
        """Dotted setting -> value, with the ``folder`` of a key where another run is named."""
        answers: dict[str, Any] = {name: folder(key) for name, key in self.refers.items()}
        answers |= {"seed": self.seed, "other_seed": self.arm.other_seed(self.seed)}
        return fill(merged(self.arm.overrides, self.grid), answers.__getitem__)  # type: ignore[no-any-return]

    def folder(self, sweep: Sweep, runs: Path) -> Path:
        """Its run folder."""
        return runs / sweep.name / self.arm.name / self.name


def cells_of(sweep: Sweep) -> dict[str, Cell]:
    """All cells by key, in the order of work: seed by seed, so that arms stay comparable.

    Raises:
        ValueError: A reference has no run to name.
    """
    short = short_names(setting for arm in sweep.arms.values() for setting in arm.grid)
    seeds = dict.fromkeys(seed for arm in sweep.arms.values() for seed in arm.seeds)
    cells = [
        _cell(sweep, arm, dict(zip(arm.grid, values, strict=True)), seed, short)
        for seed in seeds
        for arm in sweep.arms.values()
        if seed in arm.seeds
        for values in product(*arm.grid.values())
    ]
    by_key = {cell.key: cell for cell in cells}
    if len(by_key) < len(cells):
        keys = [cell.key for cell in cells]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{sweep.path}: {double} is there twice: give each grid value once.")
    return by_key


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Setting -> its shortest ending, ``init_args`` left out, that no other and no column has."""
    parts = {s: [p for p in s.split(".") if p != "init_args"] for s in settings}
    endings = {s: [".".join(p[-n:]) for n in range(1, len(p) + 1)] for s, p in parts.items()}
    return {
        setting: next(
            (
                ending
                for ending in own
                if ending not in RESERVED
                and not any(ending in endings[other] for other in endings if other != setting)
            ),
            setting,
        )
        for setting, own in endings.items()
    }


def _cell(
    sweep: Sweep, arm: Arm, point: Mapping[str, Any], seed: int, short: Mapping[str, str]
) -> Cell:
    where = f"{sweep.path}: arm {arm.name!r}"
    wanted = placeholders(merged(arm.overrides, point))
    if any(name.endswith("other_seed") for name in wanted) and len(arm.seeds) == 1:
        raise ValueError(f"{where} has one seed, so there is no other_seed: give it two.")
    refers = {}
    for reference in (name for name in wanted if name.startswith("run:")):
        target = sweep.arms[reference.split(":")[1]]
        its_seed = arm.other_seed(seed) if reference.endswith(":other_seed") else seed
        if its_seed not in target.seeds:
            raise ValueError(
                f"{where}: {{{reference}}} names seed {its_seed}, which arm {target.name!r} has "
                f"not: add it to its seeds {list(target.seeds)}."
            )
        for setting, values in target.grid.items():
            if point.get(setting) not in values:
                raise ValueError(
                    f"{where}: {{{reference}}} names no run: arm {target.name!r} has {setting} in "
                    f"its grid, with {values}; give {arm.name!r} the same grid setting."
                )
        labels = {short[setting]: _label(point[setting]) for setting in target.grid}
        refers[reference] = f"{target.name}/{_name(labels, its_seed)}"
    after = tuple(
        f"{name}/{_name({short[s]: _label(v) for s, v in zip(grid, values, strict=True)}, other)}"
        for name, grid, others in (
            (need, sweep.arms[need].grid, sweep.arms[need].seeds) for need in arm.named_needs
        )
        for other in others
        for values in product(*grid.values())
    )
    labels = {short[setting]: _label(value) for setting, value in point.items()}
    return Cell(arm, seed, point, labels, refers, after)


def _name(labels: Mapping[str, Any], seed: int) -> str:
    return ",".join(f"{name}={value}" for name, value in {**labels, "seed": seed}.items())


def _label(value: Any) -> Any:
    """A number as it is, anything else as a text that can name a folder."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    shown = text
    if isinstance(value, Mapping) and "class_path" in value:
        shown = value["class_path"].rsplit(".", 1)[-1]
    slug = re.sub(r"[^\w.+-]+", "_", shown).strip("_")
    if slug == text and len(slug) <= 40:
        return slug
    return f"{slug[:24]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
