"""Where progress is drawn: a line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ProgressDisplay:
    """One line of progress.

    Args:
        console: Where to draw; a terminal (or notebook) gets the redrawn line.
        enabled: Draws nothing where False.
    """

    def __init__(self, console: Console, *, enabled: bool = True) -> None:
        self.console = console
        self.enabled = enabled
        self.is_interactive = console.is_jupyter or (
            console.is_terminal and not console.is_dumb_terminal
        )
        self._live: Progress | None = None

    def update(self, title: str, info: str, *, completed: float, total: float) -> None:
        """Redraw the line: title, bar, info. Nothing without a terminal."""
        if not (self.enabled and self.is_interactive):
            return
        if self._live is None:
            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[info]}", markup=False),
                console=self.console,
                transient=True,
                refresh_per_second=4,
            )
            self._live.add_task(title, total=total, info=info)
            self._live.start()
        task = self._live.task_ids[0]
        self._live.update(task, description=title, completed=completed, total=total, info=info)

    def line(self, text: str) -> None:
        """A plain line that stays. Nothing on a terminal, where ``update`` has shown it."""
        if self.enabled and not self.is_interactive:
            print(text, file=self.console.file, flush=True)

    def stop(self) -> None:
        """Take the line away and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def eta_seconds(
    durations: Sequence[float], *, remaining: int, elapsed: float = 0.0, fraction: float = 0.0
) -> float | None:
    """Seconds until ``remaining`` rollouts are done, the one under way included.

    Args:
        durations: Seconds of recent whole rollouts.
        remaining: Rollouts not yet done.
        elapsed: Seconds that the one under way has taken.
        fraction: Share of its completions sampled; all there is to go by in the first rollout,
            where the estimate is a lower bound.

    Returns:
        None while nothing is known.
    """
    if remaining <= 0:
        return 0.0
    if durations:
        mean = sum(durations) / len(durations)
        return mean * (remaining - 1) + max(mean - elapsed, 0.0)
    if fraction > 0:
        return elapsed / fraction * remaining - elapsed
    return None


def clock(seconds: float | None) -> str:
    """``1:20``, ``1:02:03``; ``-:--`` where unknown."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
