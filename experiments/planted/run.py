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
import csv
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from tropism.experience import Experience
from tropism.loop.probing import Prober
from tropism.measurements.alignment import Moments, alignment, misalignment
from tropism.measurements.gradient_probe import GradientProbe
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.probe_rows import choose_probe_rows
from tropism.measurements.records import read
from tropism.models import LoRA, Model, load_policy
from tropism.objective.settings import Objective
from tropism.organism.planted import DAMAGE_FILE, damaged_keys
from tropism.policy import Policy
from tropism.rewards import Rewards
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.tasks.skills import Skills
from tropism.types import RolloutBatch
from tropism.weights import resolve

Cell = tuple[int, str, float, float | None]
"""(amount, name, value, value within kinds of module)"""

HERE = Path(__file__).parent
COLUMNS = ("part", "seed", "amount", "name", "value", "value_within_module")
NUM_GROUPS = (8, 24, 48)
GROUPS_PER_ROLLOUT = 4
NUM_ROLLOUTS = 100
UPDATE_NORMS_AFTER = (8, 24, 100)
STEP_SIZES = (0.02, 0.08)
OBJECTIVE = Objective(loss="dapo")
SAMPLING = Sampling(max_new_tokens=24, temperature=1.0)
REWARD_WEIGHTS = {"format": 0.5, "accuracy": 1.0}


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


# -- 1. frozen --------------------------------------------------------------------------------


def batches(policy: Policy, seed: int) -> Iterator[RolloutBatch]:
    """Rollout batches of the damaged model as GRPO makes them, of always new prompts."""
    engine, task = TransformersEngine(), Skills()
    engine.bind(policy)
    experience = Experience(
        engine=engine,
        tasks={task.name: task},
        rewards=Rewards(REWARD_WEIGHTS, tasks={task.name: task}),
        objective=OBJECTIVE,
        sampling=SAMPLING,
        group_size=8,
        seed=seed,
    )
    prompts = task.prompts("train", 100 * GROUPS_PER_ROLLOUT, seed)
    for rollout in range(100):
        start = rollout * GROUPS_PER_ROLLOUT
        yield experience.collect(prompts[start : start + GROUPS_PER_ROLLOUT], rollout=rollout)


def frozen(seed: int, damaged: frozenset[str]) -> list[Cell]:
    """AUC of every signal at the damaged model itself."""
    policy = load_policy(Model(name=f"organism-planted-{seed}", dtype="float32"), LoRA(8, 16))
    prober = Prober(
        policy,
        OBJECTIVE,
        SAMPLING,
        components=tuple(REWARD_WEIGHTS),
        num_prompts=GROUPS_PER_ROLLOUT,
        num_completions=4,
        choice="contrast",
        max_rows=4 * (NUM_GROUPS[-1] + GROUPS_PER_ROLLOUT),
        sketch_size=32,
        seed=seed,
    )
    moments = Moments()
    cells, used = [], []
    static: dict[str, dict[str, float | None]] = {}
    wanted = list(NUM_GROUPS)
    for batch in batches(policy, seed):
        static = static or prober.static_scores(batch)
        prober.probe(batch, REWARD_WEIGHTS)
        add_moments(moments, policy, batch, seed)
        used.append(batch)
        if prober.pool.num_prompts >= wanted[0]:
            signals = pressure_signals(prober)
            for name in ("plop", "weight_norm"):
                signals[name] = [static[site.key][name] for site in policy.sites]
            found = {
                site.key: alignment(
                    policy.weight(site), moments.inputs(site.key), moments.gradients(site.key)
                )
                for site in policy.sites
            }
            signals["misalignment"] = list(misalignment(found, policy.sites))
            signals["random"] = list(np.random.default_rng(seed).random(len(policy.sites)))
            cells += score(wanted.pop(0), signals, policy.sites, damaged)
        if not wanted:
            break
    gain = {"step_gain": step_gains(policy, used[:6], used[6:9])}
    return cells + score(24, gain, policy.sites, damaged)


def pressure_signals(prober: Prober) -> dict[str, list[float | None]]:
    estimate = prober.pool.estimate(rank=8)
    signals: dict[str, list[float | None]] = defaultdict(list)
    for site in estimate.sites:
        for name, value in {**site.signals(), "null_z": site.null_z}.items():
            signals[name].append(value)
    return signals


def contrasts(policy: Policy, batch: RolloutBatch, seed: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """(completions, advantages) of four completions of each prompt with signal."""
    for chosen in choose_probe_rows(
        batch.advantages,
        group_size=8,
        num_prompts=GROUPS_PER_ROLLOUT,
        num_completions=4,
        rng=np.random.default_rng([seed, batch.rollout]),
    ):
        rows = list(chosen.rows)
        part = rows_of(batch.rollouts, rows, pad_token_id=policy.pad_token_id)
        yield part, batch.advantages[rows]


def add_moments(moments: Moments, policy: Policy, batch: RolloutBatch, seed: int) -> None:
    linears = [(site, policy.linear(site)) for site in policy.sites]
    for part, _ in contrasts(policy, batch, seed):
        with GradientProbe(linears, policy.base.get_input_embeddings(), moments) as probe:
            logprobs, _ = policy.completion_logprobs(
                part, temperature=1.0, should_share_prompt=False
            )
            probe.backward(-logprobs.sum())


def step_gains(
    policy: Policy, learning: Sequence[RolloutBatch], judging: Sequence[RolloutBatch]
) -> list[float | None]:
    """How much the objective on ``judging`` grows when one linear alone takes a step."""
    weights = [policy.linear(site).get_parameter("weight") for site in policy.sites]
    policy.model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    for batch in learning:
        for part, advantages in contrasts(policy, batch, 0):
            logprobs, _ = policy.completion_logprobs(part, temperature=1.0)
            (advantages * logprobs.sum(dim=1)).sum().backward()
    gradients = [weight.grad for weight in weights]
    policy.model.requires_grad_(False)
    parts = [part for batch in judging for part in contrasts(policy, batch, 0)]

    @torch.no_grad()
    def objective() -> float:
        return sum(
            float(advantages @ policy.completion_logprobs(part, temperature=1.0)[0].sum(dim=1))
            for part, advantages in parts
        )

    before, gains = objective(), []
    for weight, gradient in zip(weights, gradients, strict=True):
        assert gradient is not None
        whole = weight.detach().clone()
        direction = gradient / gradient.norm() * whole.norm()
        after = []
        for size in STEP_SIZES:
            weight.data.copy_(whole + size * direction)
            after.append(objective())
        weight.data.copy_(whole)
        gains.append(max(after) - before)
    return gains


# -- 2. and 3. trained, and what the policy did -------------------------------------------------


def fit(seed: int, *, shuffled: bool) -> Path:
    """A run of the default policy; its folder."""
    name = f"{seed}_shuffled" if shuffled else f"{seed}_rewarded"
    folder = Path("runs") / "planted" / name
    if (folder / "done").exists():
        return folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    command = [Path(sys.executable).parent / "tropism", "fit", "--config", HERE / "planted.yaml"]
    command += [
        f"--seed_everything={seed}",
        f"--model.init_args.model.name=organism-planted-{seed}",
        f"--model.init_args.shuffle_rewards={str(shuffled).lower()}",
        f"--trainer.logger.init_args.version={name}",
        f"--data.init_args.num_rollouts={NUM_ROLLOUTS}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    (folder / "done").touch()
    return folder


def trained(seed: int, damaged: frozenset[str]) -> list[Cell]:
    """AUC of the signals while the model trains."""
    folder = fit(seed, shuffled=False)
    table = read(folder, "pressure")
    columns = {
        "raw": table["raw_sq"],
        "debiased": table["debiased_sq"],
        "snr": table["debiased_sq"].clip(lower=0) / table["raw_sq"],
        "null_z": table["null_z"],
        "consistency": table["consistency"],
    }
    readings: dict[str, dict[LinearSite, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, values in columns.items():
        for layer, module, value in zip(table["layer"], table["module"], values, strict=True):
            if np.isfinite(value):
                readings[name][LinearSite("", int(layer), module)].append(float(value))
    norms = read(folder, "update_norms")
    sites = [
        LinearSite("", int(layer), module)
        for layer, module in dict.fromkeys(zip(norms["layer"], norms["module"], strict=True))
    ]
    signals = {
        name: [float(np.mean(found[site])) if site in found else None for site in sites]
        for name, found in readings.items()
    }
    cells = score(NUM_ROLLOUTS, signals, sites, damaged)
    for after in UPDATE_NORMS_AFTER:
        values = {
            (layer, module): value
            for rollout, layer, module, value in zip(
                norms["rollout"], norms["layer"], norms["module"], norms["update_norm"], strict=True
            )
            if rollout == after - 1
        }
        update = {"update_norm": [values[site.layer, site.module] for site in sites]}
        cells += score(after, update, sites, damaged)
    return cells


def decisions(seed: int, *, shuffled: bool) -> list[Cell]:
    """How often the policy acted, and on what evidence."""
    folder = fit(seed, shuffled=shuffled)
    lines = (folder / "records" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    applied = sum(row["status"] == "applied" for row in rows)
    cells: list[Cell] = [(NUM_ROLLOUTS, "applied", applied, None)]
    for row in rows:
        value = row["decision"]["value"]
        for name in Z_NAMES:
            if value.get(name) is not None:
                cells.append((row["rollout"], name, value[name], None))
    return cells


# -- all --------------------------------------------------------------------------------------


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


Z_NAMES = ("pooled_z", "evidence_z")


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
