"""SFT, GRPO, and SFT before GRPO, at equal numbers of steps, learning rates tried and samples.

    python experiments/warmup/run.py --jobs 2        an hour; finished cells are skipped

Two settings: ``plain``, where every training prompt has its right answer to learn, and
``bracketed``, where answers take a form that the model never writes and 64 prompts have one.
Each arm takes 80 steps of 32 sequences (sft_then_grpo: 40 and 40). Its learning rate is the best of
five on a seed of its own; then five other seeds are run, in ``bracketed`` ten. The two phases of
sft_then_grpo take the rates that are best for each alone, ``A/B``, besides one tuned rate for both.
Rows go to ``results.csv``.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
COLUMNS = (
    "setting",
    "arm",
    "learning_rate",
    "seed",
    "skills",
    "n",
    "passed_before",
    "passed_after",
)
SETTINGS = {"plain": "", "bracketed": "bracketed_"}
ARMS = {"sft": ("sft",), "grpo": ("grpo",), "sft_then_grpo": ("sft", "grpo")}
RATES = ("2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3")
TUNING_SEED = 100
SEEDS = {"plain": range(5), "bracketed": range(10)}
NUM_STEPS = 80
writing = Lock()


def tropism(subcommand: str, config: str, name: str, *settings: str) -> Path:
    """Run the command in a folder of its own; the run folder."""
    version = f"--trainer.logger.init_args.version={name}"
    folder = Path("runs") / f"warmup_{config}" / name
    if (folder / "records" / "evals.jsonl").exists() and (folder / "done").exists():
        return folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    command = [Path(sys.executable).parent / "tropism", subcommand]
    command += ["--config", HERE / f"{config}.yaml", version, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    (folder / "done").touch()
    return folder


def passes(folder: Path) -> list[tuple[int, int]]:
    """(n, passed) of every evaluation of a run, in order."""
    from tropism.measurements.records import read

    evals = read(folder, "evals")
    return [(int(n), round(n * v)) for n, v in zip(evals["n"], evals["value"], strict=True)]


def run_cell(setting: str, arm: str, rate: str, seed: int) -> None:
    """Train one arm with one seed, evaluate, append two rows."""
    phases = ARMS[arm]
    adapter: Path | None = None
    before: list[tuple[int, int]] = []
    rates = rate.split("/") if "/" in rate else [rate] * len(phases)
    for phase, phase_rate in zip(phases, rates, strict=True):
        settings = [
            f"--seed_everything={seed}",
            f"--model.init_args.optimizer.learning_rate={phase_rate}",
            f"--data.init_args.num_rollouts={NUM_STEPS // len(phases)}",
        ]
        if adapter is not None:
            settings.append(f"--model.init_args.model.adapter={adapter}")
        config = SETTINGS[setting] + phase
        adapter = tropism("fit", config, f"{arm}_{rate.replace('/', '+')}_{seed}", *settings)
        before += passes(adapter)[:1]
    assert adapter is not None
    trained = passes(adapter)
    rows = [(setting, arm, rate, seed, "trained", *before[0], trained[-1][1])]
    if setting == "plain":
        others = [f"--seed_everything={seed}"]
        base = passes(tropism("validate", "other_skills", f"base_{seed}", *others))
        others.append(f"--model.init_args.model.adapter={adapter}")
        tuned = passes(
            tropism("validate", "other_skills", f"{arm}_{rate.replace('/', '+')}_{seed}", *others)
        )
        rows.append((setting, arm, rate, seed, "other", *base[0], tuned[-1][1]))
    with writing, RESULTS.open("a", newline="") as file:
        csv.writer(file).writerows(rows)


def finished() -> list[dict[str, str]]:
    if not RESULTS.exists():
        RESULTS.write_text(",".join(COLUMNS) + "\n")
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def run_all(cells: list[tuple[str, str, str, int]], jobs: int) -> None:
    keys = ("setting", "arm", "learning_rate")
    done = {(*(row[key] for key in keys), int(row["seed"])) for row in finished()}
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(run_cell, *cell) for cell in cells if cell not in done]:
            future.result()


def best_rates(setting: str) -> dict[str, str]:
    """Arm -> learning rate with the most passes on trained skills, on the tuning seed."""
    scores: dict[str, dict[str, int]] = defaultdict(dict)
    for row in finished():
        is_tuning = int(row["seed"]) == TUNING_SEED and row["setting"] == setting
        if is_tuning and row["skills"] == "trained":
            scores[row["arm"]][row["learning_rate"]] = int(row["passed_after"])
    return {arm: max(rates, key=lambda rate: rates[rate]) for arm, rates in scores.items()}


def report(setting: str) -> None:
    """Mean pass rates over seeds, and paired differences with 95 % intervals over seeds."""
    import numpy as np
    from scipy import stats

    rates = best_rates(setting)
    print(f"{setting}: learning rates {rates}")
    for skills in ("trained", "other") if setting == "plain" else ("trained",):
        after: dict[str, dict[int, float]] = defaultdict(dict)
        for row in finished():
            arm, seed = row["arm"], int(row["seed"])
            if row["setting"] != setting or row["skills"] != skills or seed not in SEEDS[setting]:
                continue
            if "/" in row["learning_rate"]:
                arm = "sft_then_grpo, own rates"
            if arm not in rates or row["learning_rate"] == rates[arm]:
                after[arm][seed] = int(row["passed_after"]) / int(row["n"])
                after["base"][seed] = int(row["passed_before"]) / int(row["n"])
        for arm, by_seed in after.items():
            print(
                f"{skills:8} {arm:14} {np.mean(list(by_seed.values())):.3f}  {len(by_seed)} seeds"
            )
        for arm in ("sft", "grpo"):
            combined = after["sft_then_grpo, own rates"]
            pairs = [combined[s] - after[arm][s] for s in after[arm]]
            low, high = stats.t.interval(
                0.95, len(pairs) - 1, loc=np.mean(pairs), scale=stats.sem(pairs)
            )
            interval = f"({low:+.3f} to {high:+.3f})"
            print(f"{skills:8} own rates - {arm}: {np.mean(pairs):+.3f} {interval}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    options = parser.parse_args()
    for setting in SETTINGS:
        tuning = [(setting, arm, rate, TUNING_SEED) for arm in ARMS for rate in RATES]
        run_all(tuning, options.jobs)
        rates = best_rates(setting)
        run_all(
            [(setting, arm, rates[arm], seed) for seed in SEEDS[setting] for arm in ARMS],
            options.jobs,
        )
        both = f"{rates['sft']}/{best_rates('plain')['grpo']}"
        run_all([(setting, "sft_then_grpo", both, seed) for seed in SEEDS[setting]], options.jobs)
        report(setting)


if __name__ == "__main__":
    main()
