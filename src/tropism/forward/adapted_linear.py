"""A linear with its LoRA adapter, in one function with one backward.

PEFT's own layer casts the input to the adapter's fp32, once for each linear that reads it, and
multiplies there. This one multiplies in the base's dtype with fp32 masters cast on the way, as
autocast would; keeps the input only as the base had it, shared by all linears that read it; and
adds the adapter into the base's output in place. Its results differ from PEFT's by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class AdaptedLinear(Linear):
    """PEFT's LoRA linear, by another way where nothing special is asked of it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        name = self._plain_adapter(x)
        if name is None or args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        base: Any = self.base_layer
        product: Tensor = _AdaptedProduct.apply(  # type: ignore[no-untyped-call]
            x,
            base.weight,
            base.bias,
            self.lora_A[name].weight,
            self.lora_B[name].weight,
            self.scaling[name],
        )
        return product

    def _plain_adapter(self, x: Tensor) -> str | None:
        """The one adapter in use; None for whatever PEFT's own way is needed for."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        base = self.base_layer
        if (
            len(active) != 1
            or self.disable_adapters
            or self.merged
            or type(base) is not nn.Linear
            or base._forward_hooks  # probes read what goes into the base
            or base._forward_pre_hooks
            or active[0] in self.lora_variant
            or x.dtype != base.weight.dtype
            or torch.is_autocast_enabled(x.device.type)
        ):
            return None
        dropout = self.lora_dropout[active[0]]
        has_dropout = isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
        return None if has_dropout else active[0]


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + bias + scaling (x A^T) B^T; the base has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low_a, low_b = a.to(x.dtype), (b * scaling).to(x.dtype)
        inner = rows @ low_a.T  # (N, R)
        output = linear(rows, weight, bias).addmm_(inner, low_b.T)
        ctx.save_for_backward(rows, weight, low_a, low_b, inner)
        ctx.scaling, ctx.shape = scaling, x.shape
        return output.view(*x.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, low_a, low_b, inner = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_a = grad_b = None
        if needs_x or needs_a:
            grad_inner = grad @ low_b  # (N, R)
        if needs_x:
            grad_x = (grad @ weight).addmm_(grad_inner, low_a).view(ctx.shape)
        if needs_a:
            grad_a = (grad_inner.T @ rows).float()
        if needs_b:
            grad_b = (grad.T @ inner).float() * ctx.scaling
        return grad_x, None, None, grad_a, grad_b, None
