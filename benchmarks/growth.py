"""How time and memory grow with the work, beside TRL 1.16.

    python benchmarks/growth.py            30 to 60 minutes; nothing beside it
    python benchmarks/growth.py --only vocabulary --again

Four curves through one point, SmolLM2-135M-Instruct with 2 prompts of 64 tokens x 8 completions and
LoRA on all layers: group size, prompt length, vocabulary (gemma-3-270m has 262k tokens), and the
share of layers that carry LoRA. Work and timing are those of against_trl.py, one process for each
side and point; TRL runs micro-batches of 4, accumulated to the whole rollout.

Every point is appended to ``benchmarks/results/growth.csv`` as it finishes, with commit and date; a
point that stands there is skipped, whatever its commit, unless ``--again``.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import processes
import report
from rich.console import Console
from rich.table import Table
from workload import Workload

RESULTS = Path(__file__).parent / "results" / "growth.csv"
MICRO_BATCH = 4
BASE: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "num_prompts": 2,
    "group_size": 8,
    "prompt_tokens": 64,
    "max_new_tokens": 96,
    "layers": "all",
}
CURVES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "group size": ("group_size", (4, 8, 16, 32)),
    "prompt tokens": ("prompt_tokens", (64, 256, 512)),
    "vocabulary": ("model", ("smollm2-135m-instruct", "gemma-3-270m")),
    "layers": ("layers", ("top_third", "top_half", "all")),
}
MEASURED = (
    *(f"{side}_{phase}_s" for side in ("tropism", "trl") for phase in report.PHASES),
    "tropism_tokens_per_s",
    "trl_tokens_per_s",
    "tropism_mb",
    "trl_mb",
    "throughput_ratio",
    "memory_ratio",
)
COLUMNS = (*BASE, *MEASURED, "steps", "threads", "machine", "commit", "dirty", "date")
Point = tuple[str, ...]


def key_of(row: Mapping[str, Any]) -> Point:
    """What was measured, whatever the commit."""
    return tuple(str(row[name]) for name in BASE)


def points(curves: list[str], base: Mapping[str, Any]) -> dict[Point, dict[str, Any]]:
    """The points of these curves, each once."""
    rows = [
        {**base, setting: value}
        for setting, values in (CURVES[curve] for curve in curves)
        for value in values
    ]
    return {key_of(row): row for row in rows}


def finished(path: Path) -> dict[Point, dict[str, str]]:
    """The latest row of each point in the file."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {key_of(row): row for row in csv.DictReader(file)}


def append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def measure(point: Mapping[str, Any], *, steps: int, bf16: bool) -> dict[str, Any]:
    """One row: both sides at one point."""
    from tropism.weights import resolve

    workload = Workload(**point, folder=str(resolve(point["model"])), steps=steps)
    trl = processes.trl_setting(MICRO_BATCH, workload.num_rows, bf16=bf16)
    answers = {
        setting.name: [processes.run_setting(setting, workload)]
        for setting in (trl, processes.OURS)
    }
    processes.check_same_work(answers)
    sides = {name: report.summary(workload, found) for name, found in answers.items()}
    named = {"tropism": sides[processes.OURS.name], "trl": sides[trl.name]}
    ratios = report.ratios(sides, usual=trl.name)
    return {
        **point,
        **{
            f"{name}_{phase}_s": round(side["seconds"][phase], 4)
            for name, side in named.items()
            for phase in report.PHASES
        },
        **{f"{n}_tokens_per_s": round(side["tokens_per_second"], 2) for n, side in named.items()},
        **{f"{name}_mb": round(side["megabytes"]) for name, side in named.items()},
        "throughput_ratio": round(ratios["throughput_ratio"], 3),
        "memory_ratio": round(ratios["memory_ratio"], 3),
        "steps": steps,
        "threads": answers[trl.name][0]["threads"],
    }


def table(curve: str, base: Mapping[str, Any], rows: Mapping[Point, Mapping[str, Any]]) -> Table:
    """One curve; points that are not measured yet are left out."""
    setting, values = CURVES[curve]
    shown = Table(title=f"{curve}: tropism / TRL micro-batches of {MICRO_BATCH}")
    shown.add_column(setting)
    for heading in ("step, s", "tokens/s", "peak, MB", "throughput", "memory"):
        shown.add_column(heading, justify="right")
    for value in values:
        row = rows.get(key_of({**base, setting: value}))
        if row is not None:
            pairs = (
                [float(row[f"{side}_{name}"]) for side in ("tropism", "trl")]
                for name in ("step_s", "tokens_per_s", "mb")
            )
            shown.add_row(
                str(value),
                *(f"{ours:.4g}/{theirs:.4g}" for ours, theirs in pairs),
                f"{float(row['throughput_ratio']):.2f} x",
                f"{float(row['memory_ratio']):.2f} x",
            )
    return shown


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CURVES, metavar="CURVE", help=str([*CURVES]))
    parser.add_argument("--again", action="store_true", help="measure finished points anew")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    parser.add_argument("--trl-precision", choices=("autocast", "pure"), default="autocast")
    parser.add_argument("--model", default=BASE["model"], help="of all curves but vocabulary")
    parser.add_argument("--max-new-tokens", type=int, default=BASE["max_new_tokens"])
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file")
    options = parser.parse_args(given)
    console = Console()
    if warning := processes.why_not_idle():
        console.print(f"[bold yellow]Warning:[/] {warning}", highlight=False)
    curves = options.only or list(CURVES)
    base = {**BASE, "model": options.model, "max_new_tokens": options.max_new_tokens}
    bf16 = options.trl_precision == "autocast"
    for key, point in points(curves, base).items():
        told = ", ".join(key)
        if key in finished(options.output) and not options.again:
            console.print(f"{told}: finished before (--again measures it anew)", highlight=False)
            continue
        provenance = report.provenance()
        try:
            row = measure(point, steps=options.steps, bf16=bf16)
        except processes.SideFailedError as error:
            raise SystemExit(f"{told}: {error}") from error
        facts = {name: provenance[name] for name in ("machine", "commit", "dirty", "date")}
        append(options.output, {**row, **facts})
        console.print(
            f"{told}: {row['throughput_ratio']} x the throughput, {row['memory_ratio']} x the "
            "memory",
            highlight=False,
        )
    rows = finished(options.output)
    for curve in curves:
        console.print(table(curve, base, rows))


if __name__ == "__main__":
    main()
