"""Which weights an engine of its own lacks: what has moved since it was last told, and no more.

1. What is sent is W_0 + scaling * B A, summed in fp32 from the pristine W_0 and cast once to the
   engine's dtype: the weights that the trainer's own engine samples with. W_0 is only read.
2. Engines keep some linears in one tensor (q, k and v; gate and up), and a part of it alone ruins
   the rest: linears travel in whole groups, biases included, and ``require_whole`` insists on it.
3. What moved is read off the adapters themselves, so that a start from an adapter, a resume, a
   rollback, a plan or a view need not be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tropism.lora.views import merged_weight
from tropism.measurements.layer_names import LinearSite
from tropism.policy import ADAPTER, Policy
from tropism.rollouts.engine_probe import probe

Factors = tuple[Tensor, Tensor, float]
"""A, B and scaling of an adapter that is in use."""


@dataclass(frozen=True)
class Group:
    """Linears that an engine keeps in one tensor.

    Args:
        name: The engine's module, ``model.layers.3.self_attn.qkv_proj``.
        sites: The trainer's linears, in the order in which they lie in it.
    """

    name: str
    sites: tuple[LinearSite, ...]


def groups_of(
    sites: Iterable[LinearSite], packed: Mapping[str, Sequence[str]]
) -> tuple[Group, ...]:
    """Every linear of the model, in the groups that the engine packs.

    Args:
        sites: Every linear.
        packed: Name of a packed module -> names of the linears in it, in order
            (``packed_modules_mapping`` of a vLLM model).
    """
    home = {part: (name, parts.index(part)) for name, parts in packed.items() for part in parts}
    found: dict[str, list[tuple[int, LinearSite]]] = {}
    for site in sites:
        parent, dot, own = site.name.rpartition(".")
        name, place = home.get(own, (own, 0))
        found.setdefault(f"{parent}{dot}{name}", []).append((place, site))
    return tuple(
        Group(name, tuple(site for _, site in sorted(members, key=lambda member: member[0])))
        for name, members in found.items()
    )


@dataclass(frozen=True)
class Update:
    """What is to be sent, as it was when it was found to be missing.

    Args:
        groups: Linears.
        others: Names of further parameters: all of them, or none.
        factors: site name -> the adapter then, for every linear of ``groups``.
    """

    groups: tuple[Group, ...]
    others: tuple[str, ...]
    factors: Mapping[str, Factors | None]


class WeightSync:
    """Keeps account of what an engine has.

    Args:
        policy: The trainer's.
        packed: What the engine packs; see ``groups_of``.
        dtype: Of the engine's weights.
        has_base: Whether the engine holds the policy's base weights already; it is sent every
            parameter first where not.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        packed: Mapping[str, Sequence[str]],
        dtype: torch.dtype,
        has_base: bool = True,
    ) -> None:
        self.policy, self.dtype = policy, dtype
        self.groups = groups_of(policy.sites, packed)
        self._lacks_all = not has_base
        self._delivered: dict[str, Factors | None] = {}
        self._seen: tuple[tuple[int, int], ...] | None = None

    def moved(self) -> None:
        """Weights were updated; only full-parameter training needs to be told."""
        self._seen = None

    def forget(self) -> None:
        """The engine has lost its weights."""
        self._lacks_all = True

    def pending(self) -> Update | None:
        """What the engine lacks; None where it has everything."""
        in_use = {site.name: factors_in_use(self.policy, site) for site in self.policy.sites}
        if self._lacks_all or (not self.policy.uses_lora and self._seen != self._versions()):
            return Update(self.groups, tuple(self._others()), in_use)
        stale = tuple(
            group
            for group in self.groups
            if any(not _same(in_use[s.name], self._delivered.get(s.name)) for s in group.sites)
        )
        if not stale:
            return None
        return Update(stale, (), {s.name: in_use[s.name] for group in stale for s in group.sites})

    def delivered(self, update: Update) -> None:
        """The engine has it now."""
        self._lacks_all = False
        self._delivered |= {name: _copy(factors) for name, factors in update.factors.items()}
        self._seen = self._versions()

    def names(self, update: Update) -> list[str]:
        """Of all tensors of an update, as in a checkpoint of the model."""
        return [name for name, _ in self._parts(update)]

    def tensors(self, update: Update) -> Iterator[tuple[str, Tensor]]:
        """The same names, and the tensors in the engine's dtype.

        One at a time: no second copy of the model is ever in memory.
        """
        for name, part in self._parts(update):
            value = self.weight(part, update) if isinstance(part, LinearSite) else part.detach()
            yield name, value.to(self.dtype)

    def _parts(self, update: Update) -> Iterator[tuple[str, LinearSite | nn.Parameter]]:
        """Each tensor's name, and the linear whose weight it is, or the parameter itself."""
        for group in update.groups:
            for site in group.sites:
                for name, parameter in self.policy.linear(site).named_parameters(recurse=False):
                    yield f"{site.name}.{name}", site if name == "weight" else parameter
        named = dict(self.policy.base.named_parameters())
        for name in update.others:
            yield name, named[name]

    def weight(self, site: LinearSite, update: Update) -> Tensor:
        """The weight in use at ``site``, shaped as the model keeps it; fp32 where merged."""
        layer, factors = self.policy.lora_layer(site), update.factors[site.name]
        if layer is None or factors is None:
            return self.policy.weight(site)
        with torch.no_grad():
            return merged_weight(layer, *factors)

    def expected(self, group: Group, update: Update) -> Tensor:
        """[1, N] what the engine's module must answer to the probe once it has ``update``."""
        outputs = []
        for site in group.sites:
            linear = self.policy.linear(site)
            weight = self.weight(site, update).to(self.dtype)
            columns = weight.T if isinstance(linear, nn.Linear) else weight  # GPT-2: [d_in, d_out]
            x = probe(len(columns), self.dtype).to(weight.device)
            output = x.float() @ columns.float()
            bias = getattr(linear, "bias", None)
            if isinstance(bias, Tensor):
                output = output + bias.detach().to(self.dtype).float()
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def adapters(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and scaling * B of every adapter in use, by the name of its linear, on the CPU."""
        pairs = {}
        for site in self.policy.sites:
            if (factors := factors_in_use(self.policy, site)) is not None:
                a, b, scaling = factors
                pairs[site.name] = (a.cpu(), (b * scaling).cpu())  # a power of two: exact
        return pairs

    def expected_of_adapters(
        self, group: Group, pairs: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """[1, N] what ``pairs`` must add to the answer of the engine's module."""
        outputs = []
        for site in group.sites:
            if site.name in pairs:
                a, b = (side.to(self.dtype).float() for side in pairs[site.name])
                outputs.append(probe(a.shape[1], self.dtype).float() @ a.T @ b.T)
            else:
                is_linear = isinstance(self.policy.linear(site), nn.Linear)
                num_outputs = self.policy.weight(site).shape[0 if is_linear else 1]
                outputs.append(torch.zeros(1, num_outputs))
        return torch.cat(outputs, dim=1)

    def require_whole(self, names: Iterable[str]) -> None:
        """Refuse to send a part of a group.

        Args:
            names: Of all tensors that are to be sent.

        Raises:
            RuntimeError: A tensor of a group is there, another one is missing.
        """
        sent = set(names)
        for group in self.groups:
            wanted = {
                f"{site.name}.{name}"
                for site in group.sites
                for name, _ in self.policy.linear(site).named_parameters(recurse=False)
            }
            if sent & wanted and (missing := sorted(wanted - sent)):
                raise RuntimeError(
                    f"weight sync of {group.name!r} without {missing}: the engine keeps these in "
                    "one tensor, and a part of it alone would ruin the rest."
                )

    def _others(self) -> Iterator[str]:
        """Every parameter that is neither a linear's nor an adapter's."""
        inside = tuple(f"{site.name}." for site in self.policy.sites)
        for name, _ in self.policy.base.named_parameters():
            if not name.startswith(inside):
                yield name

    def _versions(self) -> tuple[tuple[int, int], ...] | None:
        """Changes with optimizer steps, and wherever other data is shown in a weight's place."""
        if self.policy.uses_lora:
            return None
        return tuple((p.data_ptr(), p._version) for p in self.policy.base.parameters())


def factors_in_use(policy: Policy, site: LinearSite) -> Factors | None:
    """The adapter that takes part in the forward at ``site``; None where it is the base alone."""
    layer, adapter = policy.lora_layer(site), policy.adapter(site)
    if layer is None or adapter is None or layer.disable_adapters:
        return None
    b = adapter.b.detach()
    if ADAPTER not in layer.active_adapters or not b.any():
        return None
    return adapter.a.detach(), b, adapter.scaling


def _same(one: Factors | None, other: Factors | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[2] == other[2] and torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def _copy(factors: Factors | None) -> Factors | None:
    return None if factors is None else (factors[0].clone(), factors[1].clone(), factors[2])
