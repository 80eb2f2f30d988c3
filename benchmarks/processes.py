"""Runs each side in a process of its own, and says whether the machine is fit for timing.

Imports no torch: where there is no /proc, a child's peak memory starts at its parent's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workload import Workload

HERE = Path(__file__).parent
IDLE_LOAD = 0.5
PEAK_MATMUL = """
import json, sys, time, torch
a, b = (torch.randn(2048, 2048).to(torch.bfloat16) for _ in range(2))
seconds = []
for _ in range(12):
    start = time.perf_counter()
    a @ b
    seconds.append(time.perf_counter() - start)
print(json.dumps({"gflops": 2 * 2048**3 / min(seconds) / 1e9, "threads": torch.get_num_threads()}))
"""


@dataclass(frozen=True)
class Setting:
    """One side with its options, as the tables name it."""

    name: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)


OURS = Setting("tropism", "tropism_side")


def trl_setting(batch_size: int, num_rows: int, *, bf16: bool) -> Setting:
    """TRL with micro-batches of ``batch_size``, accumulated to the whole rollout."""
    name = f"TRL {batch_size} x {num_rows // batch_size}"
    return Setting(name, "trl_side", {"batch_size": batch_size, "bf16": bf16})


class SideFailedError(RuntimeError):
    """A process ended without a result; the message has the end of what it wrote."""


def run(script: str, workload: Workload, options: dict[str, Any]) -> dict[str, Any]:
    """What ``script`` hands back for this workload, run alone in a process of its own.

    Raises:
        SideFailedError: It ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(
            json.dumps({"workload": workload.state(), "options": options}), encoding="utf-8"
        )
        done = subprocess.run(
            [sys.executable, str(HERE / f"{script}.py"), str(request), str(result)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        if done.returncode != 0 or not result.exists():
            raise SideFailedError(
                f"{script}.py with {options} ended with status {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-3000:]}"
            )
        answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return answer


def run_setting(setting: Setting, workload: Workload) -> dict[str, Any]:
    """``run`` for one side, with the lengths that came out checked."""
    answer = run(setting.script, workload, setting.options)
    if answer["lengths"] != workload.lengths:
        raise SideFailedError(f"{setting.name}: lengths {answer['lengths']}")
    return answer


def check_same_work(results: dict[str, list[dict[str, Any]]]) -> None:
    """All processes saw the same prompt tokens, trained as many scalars, on as many threads.

    Raises:
        SideFailedError: They did not; their times say nothing about each other.
    """
    for key in ("prompt_token_ids", "trainable", "layers", "linear_sizes", "threads"):
        found = {
            json.dumps(answer[key], sort_keys=True)
            for answers in results.values()
            for answer in answers
        }
        if len(found) > 1:
            shown = "\n".join(sorted(text[:300] for text in found))
            raise SideFailedError(f"the sides differ in {key}:\n{shown}")


def measured_peak() -> dict[str, float]:
    """GFLOP/s of the best of 12 bf16 products of 2048 x 2048 matrices, and torch's threads."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK_MATMUL], capture_output=True, text=True, check=True
    )
    peak: dict[str, float] = json.loads(done.stdout)
    return peak


def why_not_idle() -> str | None:
    """A warning where something else runs: beside a busy process timings mean nothing."""
    load = os.getloadavg()[0]
    if load <= IDLE_LOAD:
        return None
    return (
        f"the load of the last minute is {load:.2f}, above {IDLE_LOAD}: this machine is not idle, "
        "and the times below are not to be trusted."
    )
