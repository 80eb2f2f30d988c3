"""How many pieces of model-written code does the sandbox run in a second?

    python benchmarks/sandbox_speed.py [--slots 2] [--runs 500] [--data FOLDER]

Prints runs per second, milliseconds per run and slot, and processor time a run (with a share of the
start), for a trivial function with three calls, in each mode that this machine offers; as root or
not by who starts it. With the benchmarks' data (``--data`` or ``TROPISM_DATA``) also the seconds
that all canonical solutions of MBPP take.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import time

from tropism.sandbox import Job, Mode, Sandbox
from tropism.sandbox.probe import layers_of
from tropism.sandbox.slot import ZygoteError
from tropism.tasks.code import MBPP

MODES: tuple[Mode, ...] = ("zygote", "bubblewrap", "rlimits")
JOB = Job("def f(x):\n    return sorted([x, 2, 1])", "f", ("(1,)", "(2,)", "(3,)"))


def cpu_seconds() -> float:
    """Of this process and those that have ended, zygotes and jobs among them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def speed(mode: Mode, num_slots: int, num_runs: int) -> str:
    """One line of the table."""
    try:
        sandbox = Sandbox(num_slots=num_slots, layers=layers_of(mode))
        sandbox.run_many([JOB] * num_slots)  # starts the zygotes
    except (ZygoteError, RuntimeError) as error:
        return f"{mode:<12} not here: {str(error)[:90]}"
    before, start = cpu_seconds(), time.perf_counter()
    outcomes = sandbox.run_many([JOB] * num_runs)
    seconds = time.perf_counter() - start
    sandbox.close()
    assert all(outcome.is_defined for outcome in outcomes)
    return (
        f"{mode:<12} {num_runs / seconds:7.0f} runs/s, {1000 * seconds * num_slots / num_runs:.1f} "
        f"ms a run and slot, {1000 * (cpu_seconds() - before) / num_runs:.1f} ms of processor a run"
    )


async def gold_of_mbpp(data: str | None) -> str:
    """All three splits, scored at once."""
    task = MBPP(data=data)
    prompts = [
        prompt
        for split in ("train", "validation", "test")
        for prompt in task.prompts(split, len(task.problems(split)), seed=0)
    ]
    start = time.perf_counter()
    scores = await asyncio.gather(*(task.score(p, task.gold(p)) for p in prompts))
    seconds = time.perf_counter() - start
    passed = sum(int(one["pass"] or 0) for one in scores)
    return f"MBPP: {passed} of {len(prompts)} canonical solutions pass, {seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--data", default=os.environ.get("TROPISM_DATA"))
    arguments = parser.parse_args()
    for mode in MODES:
        print(speed(mode, arguments.slots, arguments.runs), flush=True)
    if arguments.data:
        print(asyncio.run(gold_of_mbpp(arguments.data)))


if __name__ == "__main__":
    main()
