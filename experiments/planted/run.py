"""Does any signal find damaged linears, and does the default policy act there?

    python experiments/planted/run.py              about 20 minutes on one core; cells are resumed
    python experiments/planted/run.py --tables     print the tables alone

A planted organism (``model.name: organism-planted-<seed>``, see ``tropism.organism.planted``) has 6
of its 84 linears damaged; each damage alone costs the same. Parts, for seeds 0 to 4:

1. *frozen*: 8, 24 and 48 prompt groups are sampled from the damaged model, probed as in training,
   and never trained on. AUC of each signal for damaged against other linears, over all 84, and
   again with every signal replaced by its rank within its kind of module (q_proj, ...), since
   scales differ between kinds. ``step_gain`` is a measured one: each linear alone takes steps of
   2 % and 8 % of its norm along the mean gradient of half of the groups; its score is the larger
   change of the objective on 12 other groups.
2. *trained*: a run of 100 rollouts (planted.yaml); signals averaged over its readings, and the
   update norms after 8, 24 and 100 rollouts.
3. *decisions*: how often the default policy (SignalShrink, default gate) acted in that run, and in
   one under shuffled rewards. It must in at least 4 of 5 runs, and in at most 1 of 5.

Signals were chosen and tuned on seeds 100 to 102 only (``--seeds 100 101 102 --results other.csv``
repeats that); 0 to 4 were measured once, with all settings fixed.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from frozen import frozen
from scores import Cell, Results
from trained import Z_NAMES, decisions, trained

from tropism.organism.planted import DAMAGE_FILE, damaged_keys
from tropism.weights import resolve

HERE = Path(__file__).parent


def measure(results: Results, seeds: Sequence[int]) -> None:
    """Part by part, so that what says most is there first."""
    damaged = {}
    for seed in seeds:
        folder = resolve(f"organism-planted-{seed}")
        damaged[seed] = damaged_keys(folder)
        if not results.has("damage", seed):
            damage = json.loads((folder / DAMAGE_FILE).read_text(encoding="utf-8"))
            names = ("undamaged_accuracy", "accuracy", "fall")
            cells = [(len(damaged[seed]), name, damage[name], None) for name in names]
            results.add("damage", seed, cells)
    parts: dict[str, Callable[[int], list[Cell]]] = {
        "frozen": lambda seed: frozen(seed, damaged[seed]),
        "decisions": lambda seed: decisions(seed, shuffled=False),
        "decisions_shuffled": lambda seed: decisions(seed, shuffled=True),
        "trained": lambda seed: trained(seed, damaged[seed]),
    }
    for part, run in parts.items():
        for seed in seeds:
            if not results.has(part, seed):
                results.add(part, seed, run(seed))


def print_tables(results: Results, seeds: Sequence[int]) -> None:
    rows = [row for row in results.rows if int(row["seed"]) in seeds]
    falls = [(row["seed"], row["value"]) for row in rows if row["name"] == "fall"]
    print("relative fall of accuracy:", ", ".join(f"seed {s}: {float(v):.0%}" for s, v in falls))
    for part, unit in (("frozen", "groups"), ("trained", "rollouts")):
        found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            if row["part"] == part:
                pair = (float(row["value"]), float(row["value_within_module"]))
                found[row["name"], int(row["amount"])].append(pair)
        print(f"\n{part}: AUC, over all linears | within kinds of module; mean, then each seed")
        for (name, amount), pairs in sorted(found.items()):
            overall, within = zip(*pairs, strict=True)
            print(
                f"{name:14s} {amount:3d} {unit}  {np.mean(overall):.2f} ({_list(overall)})"
                f" | {np.mean(within):.2f} ({_list(within)})"
            )
    print("\ndecisions applied, and the largest z (of one reading / combined)")
    for part in ("decisions", "decisions_shuffled"):
        acted = 0
        for seed in seeds:
            mine = [r for r in rows if r["part"] == part and r["seed"] == str(seed)]
            if not mine:
                continue
            z = {n: [float(r["value"]) for r in mine if r["name"] == n] for n in Z_NAMES}
            applied = int(float(mine[0]["value"]))
            acted += applied > 0
            largest = " / ".join(f"{max(z[n], default=float('nan')):.1f}" for n in Z_NAMES)
            print(f"{part:20s} seed {seed}: {applied} of {len(z['pooled_z'])}, z {largest}")
        print(f"{part:20s} runs that acted: {acted}")


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    parser.add_argument("--tables", action="store_true", help="only print what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.results)
    if not arguments.tables:
        measure(results, arguments.seeds)
    print_tables(results, arguments.seeds)


if __name__ == "__main__":
    main()
