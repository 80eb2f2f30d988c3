"""The same layers in another light, for as long as a block lasts.

A ``View`` shows other data in a parameter's place, switches a layer's adapter off, or has a module
compute otherwise, and gives back exactly what was there, also after an exception. Nothing is ever
written into the tensors that it hides: the base cannot drift, and what trains is untouched.

PEFT's own ``disable_adapter`` also changes which parameters are trainable (peft#3447), and its
``merge``/``unmerge`` add to and subtract from the base in its own precision (trl#6688).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tropism.forward.packed_linear import PackedLinear, can_pack


class View:
    """A context that undoes what was shown in it. Never entered between forward and backward."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._disabled: list[LoraLayer] = []
        self._replaced: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> View:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for parameter, data in reversed(self._hidden):
            parameter.data = data
        for layer in self._disabled:
            layer._disable_adapters = False
        for module, forward in reversed(self._replaced):
            if forward is None:
                del module.forward
            else:
                module.forward = forward

    def show(self, parameter: nn.Parameter, data: Tensor) -> None:
        """Let ``parameter`` hold ``data`` until the block ends."""
        self._hidden.append((parameter, parameter.data))
        parameter.data = data.to(parameter.device)

    def disable(self, layer: LoraLayer) -> None:
        """Let ``layer`` be its base alone until the block ends."""
        self._disabled.append(layer)
        layer._disable_adapters = True

    def compute(self, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
        """Let ``module`` compute ``forward`` until the block ends."""
        self._replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    def pack(self, linear: nn.Linear, *, num_rows: int, weight: Tensor | None = None) -> None:
        """Let ``linear`` multiply with a packed copy of ``weight`` (its own where None)."""
        packed = linear.weight.detach() if weight is None else weight
        bias = None if linear.bias is None else linear.bias.detach()
        self.compute(linear, PackedLinear(packed, bias, num_rows=num_rows))

    def merge(
        self,
        layer: LoraLayer,
        a: Tensor,
        b: Tensor,
        scaling: float,
        *,
        num_rows: int | None = None,
    ) -> None:
        """Let the base of ``layer`` compute with W_0 + scaling * b @ a, its adapter off.

        The sum is made in fp32 from the pristine W_0 and cast once; with ``num_rows`` it is packed
        for that many, where that is possible.
        """
        base = layer.get_base_layer()
        weight = base.weight
        assert isinstance(weight, nn.Parameter)
        total = merged_weight(layer, a, b, scaling).to(weight.dtype)
        if num_rows is not None and isinstance(base, nn.Linear) and can_pack(total):
            self.pack(base, num_rows=num_rows, weight=total)
        else:
            self.show(weight, total)
        self.disable(layer)


def merged_weight(layer: LoraLayer, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W_0 + scaling * b @ a in fp32, shaped as the base of ``layer`` keeps its weight."""
    weight = layer.get_base_layer().weight
    assert isinstance(weight, nn.Parameter)
    if getattr(layer, "fan_in_fan_out", False):  # GPT-2 keeps its weights as [d_in, d_out]
        a, b = b.T, a.T
    return torch.addmm(weight.data.float(), b, a, alpha=scaling)
