"""Which cells there are to run, and what is said of those that stand still."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from .state import State

NUM_DIFFERENCES = 3


def to_run(
    state: State, pattern: str | None = None, *, should_rerun_stale: bool = False
) -> list[str]:
    """Keys of the cells to run, in the order of work, with those whose runs they need.

    Args:
        state: The sweep.
        pattern: Shell pattern of arms, or of ``arm/cell``; all cells where None.
        should_rerun_stale: Whether finished runs of other settings are run anew.

    Raises:
        ValueError: The pattern fits no cell.
    """
    statuses = state.statuses()
    open_statuses = {"unfinished", "failed"} | ({"stale"} if should_rerun_stale else set())
    waiting = [key for key in matching(state, pattern) if statuses[key] in open_statuses]
    wanted: set[str] = set()
    while waiting:
        key = waiting.pop()
        wanted.add(key)
        cell = state.cells[key]
        # Finished elsewhere is enough to come after a run, but not to read its folder.
        lacking = {other for other in cell.refers.values() if not state.has_run(other)}
        lacking |= {other for other in cell.after if statuses[other] != "finished"}
        allowed = {o for o in lacking if should_rerun_stale or statuses[o] != "stale"}
        waiting += allowed - wanted
    return [key for key in state.cells if key in wanted]


def matching(state: State, pattern: str | None) -> list[str]:
    """Keys that a pattern fits.

    Raises:
        ValueError: There are none.
    """
    if pattern is None:
        return list(state.cells)
    keys = [
        key
        for key, cell in state.cells.items()
        if fnmatchcase(key, pattern) or fnmatchcase(cell.arm.name, pattern)
    ]
    if not keys:
        raise ValueError(
            f"--only {pattern!r} fits no cell of {state.sweep.path}: give an arm of "
            f"{list(state.sweep.arms)}, or ARM/CELL with * for any text."
        )
    return keys


def why_stale(state: State, key: str) -> str:
    """Settings in which the run that is there differs from the one asked for."""
    from tropism.matched import differences, flatten

    before = state.record(key).get("settings")
    if not isinstance(before, Mapping):
        return "the committed rows are of other settings, and its run folder is not here"
    rows = differences(flatten(before), flatten(state.plain_settings(key)))
    shown = [f"{name} was {old}, is {new}" for name, old, new in rows[:NUM_DIFFERENCES]]
    if len(rows) > NUM_DIFFERENCES:
        shown.append(f"and {len(rows) - NUM_DIFFERENCES} more")
    return "; ".join(shown) or "the committed rows are of other settings"
