"""Scores that need no reward: controls that a measured signal must beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tropism.measurements.layer_names import LinearSite


def weight_norm(weight: Float[Tensor, "rows columns"]) -> float:
    """||W||_F / sqrt(d_in d_out), in fp32: the root mean square of the entries."""
    norm = float(torch.linalg.vector_norm(weight.detach().float()))
    return norm / math.sqrt(weight.numel())


@torch.no_grad()
def feature_norm(
    outputs: Float[Tensor, "N d_out"],
    inputs: Float[Tensor, "N d_in"],
    weight: Float[Tensor, "rows columns"],
) -> float | None:
    """||W z|| / ||W z_rand|| of one linear, z_rand Gaussian of the norm of z; the mean over tokens.

    The denominator is taken exactly, as its root mean square ||z|| ||W||_F / sqrt(d_in), rather
    than from one draw per token. Above 1: real inputs lie in directions that W amplifies.

    Args:
        outputs: W z of each token, without bias.
        inputs: z of each token.
        weight: W, or its transpose.

    Returns:
        None where no token has a non-zero input, or W is 0.
    """
    norms = torch.linalg.vector_norm(inputs.float(), dim=1)
    scale = norms * torch.linalg.vector_norm(weight.float()) / inputs.shape[1] ** 0.5
    ratios = torch.linalg.vector_norm(outputs.float(), dim=1) / scale
    ratios = ratios[scale > 0]
    return float(ratios.mean()) if len(ratios) else None


@torch.no_grad()
def plop(
    linears: Sequence[tuple[LinearSite, nn.Module]],
    forward: Callable[[], Any],
    *,
    mask: Bool[Tensor, "m S"] | None = None,
) -> tuple[float | None, ...]:
    """The normalised feature norm of PLoP (2506.20629) at every linear, of its own weight alone.

    Args:
        linears: Every linear and its module, without its adapter.
        forward: Runs the model once on real prompts.
        mask: True on real tokens; all where None.

    Returns:
        One score per linear; None where the forward did not use it.
    """
    scores: list[float | None] = [None] * len(linears)

    def measure(index: int, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0].flatten(0, -2)
        y = output.flatten(0, -2)
        if module.bias is not None:
            y = y.float() - module.bias.float()
        if mask is not None and mask.numel() == len(x):
            x, y = x[mask.flatten()], y[mask.flatten()]
        scores[index] = feature_norm(y, x, module.weight)

    handles = [
        linear.register_forward_hook(partial(measure, index))
        for index, (_, linear) in enumerate(linears)
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(scores)
