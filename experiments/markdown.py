"""Pieces of the pages that studies write about their results."""

from __future__ import annotations

from collections.abc import Iterable

from paper_figures.intervals import Interval


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval_text(interval: Interval, sign: str = "", digits: int = 3) -> str:
    """``value (low to high)``; ``sign`` "+" also marks what is positive."""
    value, low, high = (f"{number:{sign}.{digits}f}" for number in interval[:3])
    return f"{value} ({low} to {high})"
