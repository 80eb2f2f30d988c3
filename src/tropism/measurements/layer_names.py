"""Which layer and which module a linear is, read off its qualified name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSite:
    """One linear of the model, as records and plans name it.

    Args:
        name: Qualified name in the base model, ``model.layers.3.self_attn.q_proj``.
        layer: Decoder layer index, or None outside the layers.
        module: Short label, ``q_proj``; the longer ``self_attn.out_proj`` where the short one
            would be ambiguous within a layer.
    """

    name: str
    layer: int | None
    module: str

    @property
    def key(self) -> str:
        """``3.q_proj``; the bare module name outside the layers. Unique within a model."""
        return self.module if self.layer is None else f"{self.layer}.{self.module}"


def name_sites(names: Sequence[str]) -> tuple[LinearSite, ...]:
    """Label linears by layer and module.

    The layer is the first integer of the path; what follows it names the module. Experts keep
    their own integer (``mlp.experts.7.down_proj``), so that (layer, module) stays unique.
    """
    split: list[tuple[int | None, str]] = []
    for name in names:
        parts = name.split(".")
        position = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if position is None:
            split.append((None, name))
        else:
            split.append((int(parts[position]), ".".join(parts[position + 1 :])))
    remainders: dict[str, set[str]] = {}
    for _, remainder in split:
        remainders.setdefault(remainder.rsplit(".", 1)[-1], set()).add(remainder)
    return tuple(
        LinearSite(
            name=name,
            layer=layer,
            module=remainder.rsplit(".", 1)[-1]
            if len(remainders[remainder.rsplit(".", 1)[-1]]) == 1
            else remainder,
        )
        for name, (layer, remainder) in zip(names, split, strict=True)
    )
