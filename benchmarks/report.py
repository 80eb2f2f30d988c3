"""Medians, ratios, tables: from what the processes measured to what is told."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from processes import HERE, OURS
from rich.table import Table
from workload import Workload, least_flops

PHASES = ("rollout", "reward", "train", "step")
PACKAGES = ("tropism", "torch", "transformers", "peft", "lightning", "trl")


def summary(workload: Workload, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all processes of one side together.

    Returns:
        ``seconds`` (medians over the timed steps, by phase), ``tokens_per_second`` (completion
        tokens, whole steps), ``megabytes`` (the leanest process's peak), ``achieved_gflops`` by
        phase and ``num_steps``.
    """
    steps = [step for answer in answers for step in answer["steps"]]
    seconds = {phase: statistics.median(step[phase] for step in steps) for phase in PHASES}
    flops = least_flops(
        answers[0]["linear_sizes"],
        num_prompts=workload.num_prompts,
        prompt_tokens=workload.prompt_tokens,
        lengths=workload.lengths,
        layers=answers[0]["layers"],
    )
    return {
        "seconds": seconds,
        "tokens_per_second": sum(workload.lengths) / seconds["step"],
        "megabytes": min(answer["megabytes"] for answer in answers),
        "achieved_gflops": {phase: flops[phase] / seconds[phase] / 1e9 for phase in flops},
        "num_steps": len(steps),
    }


def ratios(sides: Mapping[str, Mapping[str, Any]], *, usual: str) -> dict[str, float]:
    """Ours over TRL's: throughput against the ``usual`` setting and the fastest, and memory."""
    ours = sides[OURS.name]
    trl = [side for name, side in sides.items() if name != OURS.name]
    fastest = max(side["tokens_per_second"] for side in trl)
    return {
        "throughput_ratio": ours["tokens_per_second"] / sides[usual]["tokens_per_second"],
        "throughput_ratio_best": ours["tokens_per_second"] / fastest,
        "memory_ratio": ours["megabytes"] / min(side["megabytes"] for side in trl),
    }


def provenance() -> dict[str, Any]:
    """Machine, commit, date and versions."""
    return {
        "machine": cpu_name(),
        **commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }


def commit() -> dict[str, Any]:
    """Short id of the checkout, and whether files other than results differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changes = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(changes)}


def cpu_name() -> str:
    """As the kernel calls it; the bare architecture where there is no /proc."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(sides: Mapping[str, Mapping[str, Any]], *, title: str, peak_gflops: float) -> Table:
    """One column for each side."""
    shown = Table(title=title, caption=f"measured peak {peak_gflops:.0f} GFLOP/s (bf16 products)")
    shown.add_column("medians of steps")
    for name, side in sides.items():
        shown.add_column(f"{name}\n({side['num_steps']} timed)", justify="right")

    every = list(sides.values())
    for phase in PHASES:
        shown.add_row(f"{phase}, s", *[f"{side['seconds'][phase]:.3f}" for side in every])
    shown.add_row("completion tokens/s", *[f"{side['tokens_per_second']:.1f}" for side in every])
    shown.add_row("peak memory, MB", *[f"{side['megabytes']:.0f}" for side in every])
    for phase in ("rollout", "train"):
        rates = [side["achieved_gflops"][phase] for side in every]
        cells = [f"{rate:.1f} ({rate / peak_gflops:.1%})" for rate in rates]
        shown.add_row(f"{phase}, GFLOP/s (of peak)", *cells)
    return shown
