"""One linear and the adapter injected on it: what a plan's entry means for PEFT's layer.

PEFT's own toggles (``set_adapter`` of a model, ``disable_adapter``, ``add_adapter``) change which
adapters are active and what has gradients. Both follow from the plan here and are never read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tropism.lora.plan import State

if TYPE_CHECKING:
    from tropism.measurements.layer_names import LinearSite


class Slot:
    """The adapter of one linear, A [R, d_in] and B [d_out, R]; component c is row c and column c.

    Args:
        site: The linear.
        layer: PEFT's layer there.
        adapter: Name of the adapter in it.
    """

    def __init__(self, site: LinearSite, layer: LoraLayer, adapter: str) -> None:
        self.site, self.layer, self.adapter = site, layer, adapter

    # Looked up each time: what moves or shards a model may make new parameters.
    @property
    def a(self) -> nn.Parameter:
        """[R, d_in]."""
        return self._weight(self.layer.lora_A)

    @property
    def b(self) -> nn.Parameter:
        """[d_out, R]."""
        return self._weight(self.layer.lora_B)

    def _weight(self, side: nn.ModuleDict) -> nn.Parameter:
        weight = side[self.adapter].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def beyond(self, rank: int, of: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Views of the components from ``rank`` on, of A and B or of tensors shaped like them."""
        a, b = of if of is not None else (self.a.detach(), self.b.detach())
        return a[rank:], b[:, rank:]

    def num_scalars(self, rank: int) -> int:
        """Scalars of so many components."""
        return rank * (self.a.shape[1] + self.b.shape[0])

    def is_in_use(self) -> bool:
        """Whether B is anything but 0."""
        return bool(self.b.detach().any())

    def set_state(self, state: State) -> None:
        """Make the adapter active and trainable as the state says; cheap and idempotent."""
        self.layer._disable_adapters = False
        self.layer.set_adapter(
            [] if state == "OFF" else [self.adapter], inference_mode=state != "TRAIN"
        )

    def problem(self, state: State) -> str | None:
        """In what the layer differs from ``state``; None where it does not."""
        layer = self.layer
        if layer.merged_adapters:
            return f"has {layer.merged_adapters} merged into its base (unmerge them)"
        if layer.disable_adapters:
            return "has its adapters disabled"
        expected = [] if state == "OFF" else [self.adapter]
        if layer.active_adapters != expected:
            return f"has active adapters {layer.active_adapters}, not {expected}"
        for side in (layer.lora_A, layer.lora_B):
            for name, module in side.items():
                should_train = state == "TRAIN" and name == self.adapter
                if module.weight.requires_grad != should_train:
                    return f"has requires_grad={not should_train} in its adapter {name!r}"
        return None

    def reenter_on(self, a_new: Tensor) -> None:
        """Write other rows of A, where B is 0 (``Placement.reenter_on``)."""
        name, (rows, width) = self.site.name, self.a.shape
        if self.is_in_use():
            raise ValueError(
                f"reenter_on({name!r}): B is not 0 there, so another A would change the function; "
                "only an adapter that never trained can start anew."
            )
        if a_new.ndim != 2 or a_new.shape[0] > rows or a_new.shape[1] != width:
            raise ValueError(
                f"reenter_on({name!r}): A is [{rows}, {width}], the new rows are "
                f"{list(a_new.shape)}; give [k, {width}] with k of at most {rows}."
            )
        if not torch.isfinite(a_new).all():
            raise ValueError(f"reenter_on({name!r}): the new rows are not finite.")
        self.a.detach()[: a_new.shape[0]] = a_new

    def truncate(self, rank: int) -> float:
        """Zero the components from ``rank`` on; returns the relative change of the weight."""
        change = self._weight_change(rank)
        self.beyond(rank)[1].zero_()
        return change

    def _weight_change(self, rank: int) -> float:
        """||scaling B A of the components from ``rank`` on|| / ||W_0 + scaling B A||, in fp32."""
        scaling = self.layer.scaling[self.adapter]
        base = self.layer.get_base_layer().weight
        assert isinstance(base, Tensor)
        a, b = self.a.detach().float(), self.b.detach().float()
        dropped_a, dropped_b = self.beyond(rank, (a, b))
        weight = base.detach().float()
        if getattr(self.layer, "fan_in_fan_out", False):  # GPT-2 keeps its weights as [d_in, d_out]
            weight = weight.T
        change = torch.linalg.matrix_norm(scaling * dropped_b @ dropped_a)
        return float(change / torch.linalg.matrix_norm(torch.addmm(weight, b, a, alpha=scaling)))
