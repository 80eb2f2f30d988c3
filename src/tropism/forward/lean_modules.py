"""Norms and gated MLPs that keep less for the backward; the forward is the same, bit for bit.

transformers writes them as chains of small operations, each of which keeps its own operands, some
in fp32: a third of all that a training forward of a small model holds. Here each is one function
that keeps its inputs alone. A module is only replaced after it was seen to give the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu


def use_lean_modules(model: nn.Module, *, is_checkpointed: bool = False) -> int:
    """Replace the forward of all modules that are known; their own weights must be frozen.

    Args:
        model: Any model of transformers.
        is_checkpointed: Layers are recomputed in the backward, so that gated MLPs, which keep two
            tensors by their own means, would keep more than if they were left alone.

    Returns:
        How many were replaced.
    """
    num_replaced = 0
    for module in model.modules():
        lean = _lean_norm(module)
        if lean is None and not is_checkpointed:
            lean = _lean_mlp(module)
        if lean is not None:
            module.forward = lean
            num_replaced += 1
    return num_replaced


def _lean_norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.requires_grad:
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None:
        return None
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(3, *weight.shape, generator=generator).to(weight)
    with torch.no_grad():
        expected = module(sample)
        for has_offset in (False, True):
            lean = partial(_norm, weight=weight, epsilon=epsilon, has_offset=has_offset)
            if torch.equal(lean(sample), expected):
                return lean
    return None


def _norm(hidden: Tensor, *, weight: Tensor, epsilon: float, has_offset: bool) -> Tensor:
    if not (torch.is_grad_enabled() and hidden.requires_grad):  # decoding counts microseconds
        return _norm_and_scale(hidden, weight, epsilon, has_offset)[0]
    output: Tensor = _Norm.apply(hidden, weight, epsilon, has_offset)  # type: ignore[no-untyped-call]
    return output


def _norm_and_scale(
    hidden: Tensor, weight: Tensor, epsilon: float, has_offset: bool
) -> tuple[Tensor, Tensor]:
    """RMSNorm, and the 1 / RMS [..., 1] of each position; both as transformers computes them."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if has_offset:
        return (wide * scale * (1.0 + weight.float())).to(hidden.dtype), scale
    return weight * (wide * scale).to(hidden.dtype), scale


class _Norm(torch.autograd.Function):
    """RMSNorm as Llama has it, or with weights off 1 as Gemma has it (``has_offset``)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float, has_offset: bool
    ) -> Tensor:
        output, scale = _norm_and_scale(hidden, weight, epsilon, has_offset)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.has_offset = has_offset
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight, scale = ctx.saved_tensors
        gain = weight.float() + 1.0 if ctx.has_offset else weight.float()
        wide = grad * gain  # fp32; never in place: in an fp32 model these are others' tensors
        normed = hidden * scale
        mean = torch.linalg.vecdot(wide, normed)[..., None] / hidden.shape[-1]
        return wide.sub_(normed.mul_(mean)).mul_(scale).to(hidden.dtype), None, None, None


def _lean_mlp(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    gate: Any = getattr(module, "gate_proj", None)
    has_parts = gate is not None and hasattr(module, "up_proj") and hasattr(module, "down_proj")
    if not has_parts or "SiLU" not in type(getattr(module, "act_fn", None)).__name__:
        return None
    lean = partial(_gated_mlp, module)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(6, gate.in_features, generator=generator).to(gate.weight)
    sample[3:] *= 100  # some clamp what is large
    with torch.no_grad():
        return lean if torch.equal(lean(sample), module(sample)) else None


def _gated_mlp(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    output: Tensor
    if not (torch.is_grad_enabled() and gate.requires_grad):
        output = module.down_proj(silu(gate) * up)
        return output
    gated: Tensor = _GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]
    # ``down_proj`` would keep its input for its adapter; it is made again from what is kept anyway.
    address, kept_gate, kept_up = gated.data_ptr(), gate.detach(), up.detach()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        is_same = tensor.data_ptr() == address and tensor.numel() == gated_size
        return tensor.shape if is_same and tensor.is_contiguous() else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        made_again: Tensor = silu(kept_gate) * kept_up
        return made_again.view(packed)

    gated_size = gated.numel()
    with saved_tensors_hooks(pack, unpack):
        output = module.down_proj(gated)
    return output


class _GatedSilu(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)
