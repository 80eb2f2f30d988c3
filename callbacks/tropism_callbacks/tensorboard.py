"""Scalars to every logger; images and text to TensorBoard, where there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from tropism.measurements.disk import explained_disk_full
from tropism.measurements.heat_map import draw_heat_map, layer_by_module, render
from tropism.measurements.layer_names import LinearSite

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


def summary_writer(trainer: Trainer) -> SummaryWriter | None:
    """TensorBoard's writer, or None where the trainer has no TensorBoardLogger (or not here)."""
    if not trainer.is_global_zero:
        return None
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            writer: SummaryWriter = logger.experiment
            return writer
    return None


def log_scalars(trainer: Trainer, scalars: Mapping[str, float | None], *, x: int) -> None:
    """Log what is defined and finite; an undefined value leaves a gap, never a zero."""
    finite = {
        name: float(value)
        for name, value in scalars.items()
        if value is not None and math.isfinite(value)
    }
    if not finite:
        return
    for logger in trainer.loggers:
        with explained_disk_full(trainer.log_dir or "."):
            logger.log_metrics(finite, step=x)


def log_heat_map(
    trainer: Trainer,
    name: str,
    sites: Sequence[LinearSite],
    values: Sequence[float | None],
    *,
    title: str,
    x: int,
) -> None:
    """Log a layer x module image of one value per site."""
    writer = summary_writer(trainer)
    if writer is not None:
        matrix, layers, modules = layer_by_module(sites, values)
        pixels = render(draw_heat_map(matrix, layers, modules, title=title))
        with explained_disk_full(trainer.log_dir or "."):
            writer.add_image(name, pixels, x, dataformats="HWC")


def log_figure(trainer: Trainer, name: str, figure: Figure, *, x: int) -> None:
    """Log a drawing as an image."""
    writer = summary_writer(trainer)
    if writer is not None:
        with explained_disk_full(trainer.log_dir or "."):
            writer.add_image(name, render(figure), x, dataformats="HWC")


def log_markdown(trainer: Trainer, name: str, markdown: str, *, x: int) -> None:
    """Log a page of Markdown; quote what a model wrote with ``quoted`` first."""
    writer = summary_writer(trainer)
    if writer is not None:
        with explained_disk_full(trainer.log_dir or "."):
            writer.add_text(name, markdown, x)


def quoted(text: str) -> str:
    """``text`` as a Markdown block that nothing inside it can end or style.

    An indented code block, since a fenced one ends at a fence in the text and a table cell at a
    bar. It stands in paragraphs of its own.
    """
    lines = text.splitlines() or [""]
    if not text.strip():
        return "\n\n*(empty)*\n\n"
    return "\n\n" + "\n".join("    " + line for line in lines) + "\n\n"
