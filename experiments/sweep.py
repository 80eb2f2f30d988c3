"""Run a study: configs x seeds x overrides, as processes, finished cells skipped.

    python experiments/sweep.py experiments/study/choose.yaml --jobs 2
    python experiments/sweep.py experiments/study/choose.yaml --dry-run      what there is to do
    python experiments/sweep.py experiments/study/choose.yaml --only 'shuffled*' --minutes 50

A sweep file:

    name: choose                        runs go to runs/choose/ARM/CELL/, with CELL.log beside
    question: Which signal places best?
    seeds: [0, 1, 2]                    an arm may have its own
    overrides:                          of all arms: any setting of `tropism fit`, dotted
      data.init_args.num_rollouts: 50
      trainer.callbacks.Checkpoint.every_n_rollouts: 5        of the callback of that class
      trainer.callbacks+: [{class_path: tropism_callbacks.KLDrift}]            adds, or replaces
    grid:                               crossed; also below an arm
      model.init_args.optimizer.learning_rate: [5e-4, 1e-3]
    arms:
      signal: {config: ../placement/signal_shrink.yaml}       from here, or from the repository
      replay:
        config: ../placement/replay_final.yaml
        overrides: {trainer.callbacks.AdaptiveLoRA.policy.plans: "{run:signal:other_seed}"}
    results: choose.csv                 optional: rows of finished cells, to be committed
    collect: tables.py:learning         (cell, run folder) -> DataFrame; the evaluations if left out

``{seed}`` stands for the cell's seed, ``{other_seed}`` for the next of the list, ``{run:ARM}`` for
the run folder of that arm at the same grid point and seed, ``{run:ARM:other_seed}`` for that of the
next seed; such cells wait for the run that they name. ``needs: ARM`` waits for all cells of an arm.

All that a cell sets lies in its ``overlay.yaml``, the last ``--config`` of its command: there a
list of callbacks can be added to, and the whole is one file to read. A cell is finished when its
run.json says so, or when the results have rows of it, and the hash of its complete settings (every
default filled in) is that of now. Of other settings it is *stale*: named, and run again with
``--rerun-stale`` only; ``--accept-stale`` lets it count, as when the code has gained a setting that
changes nothing. A run whose folder another one names is run again where the folder is missing; its
committed rows stay. What was stopped goes on from its last checkpoint, what failed begins anew.

``runs/NAME/index.csv`` has a row per cell. Exit code: 0, also when minutes are over; 1 if cells
failed or wait for one that did; 2 if the file is refused; 130 if stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from sweeping import Runner, State, open_sweep
from sweeping.planning import matching, to_run, why_stale

_console = Console(highlight=False, markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", help="the sweep file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (> 1: a thread each)")
    parser.add_argument("--only", metavar="PATTERN", help="of arms or ARM/CELL, and what they need")
    parser.add_argument("--minutes", type=float, help="stop then; resumed by the same command")
    parser.add_argument("--runs", default="runs", help="folder of all runs (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="check and list, run nothing")
    stale = parser.add_mutually_exclusive_group()
    stale.add_argument("--rerun-stale", action="store_true", help="run stale cells anew")
    stale.add_argument("--accept-stale", action="store_true", help="let stale cells count")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give 1 or more")
    for number in (signal.SIGINT, signal.SIGTERM):  # also where the shell had them ignored
        signal.signal(number, signal.default_int_handler)
    try:
        state = open_sweep(options.sweep, options.runs)
        if options.accept_stale:
            _accept(state, options.only)
        keys = to_run(state, options.only, should_rerun_stale=options.rerun_stale)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _report(state, keys, should_list=options.dry_run)
    if options.dry_run:
        return 0
    try:
        state.collect()  # of runs that finished when their rows could not be written any more
        failed = Runner(state, options.jobs, _console.print, options.minutes).run(keys)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    if failed:
        print(f"{len(failed)} cells failed or wait for one: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _accept(state: State, pattern: str | None) -> None:
    statuses = state.statuses()
    for key in matching(state, pattern):
        if statuses[key] == "stale":
            state.accept(key)


def _report(state: State, keys: Sequence[str], *, should_list: bool) -> None:
    statuses = state.statuses()
    _console.print(f"{state.sweep.name}: {state.sweep.question}")
    for key, status in statuses.items():
        if should_list:
            _console.print(f"  {status:10} {key}{'  <- to run' if key in keys else ''}")
        if status == "stale" and key not in keys:
            _console.print(f"  {key} is stale: {why_stale(state, key)}.")
    if "stale" in statuses.values():
        _console.print("  --rerun-stale runs stale cells anew, --accept-stale lets them count.")
    counts = Counter(statuses.values())
    text = ", ".join(f"{number} {status}" for status, number in counts.items())
    _console.print(f"{len(statuses)} cells: {text}; {len(keys)} to run.")


if __name__ == "__main__":
    sys.exit(main())
