"""Each reward component's own gradient at every linear, and how they point, without more passes.

Advantages that are linear in the components are sums of the components' own shares,
a = sum_k a_k. The gradient of component k is then G_k = sum_i a_ki g_i over the same sequences, so
that norms and cosines of all components come from one Gram matrix per linear (GradNorm 1711.02257
and 2509.11452 take one backward each). Linear are: centred advantages; those divided by the
group's measured standard deviation, taken as given; and GDPO's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tropism.measurements.pressure_statistics import debiased_energy, raw_energy


@dataclass(frozen=True)
class RewardGradients:
    """Squared norms and inner products of the K components' gradients at every site.

    Args:
        components: Names, in the order of K.
        raw: [sites, K] mean squared norm of one prompt's gradient.
        debiased: [sites, K] squared norm of the mean gradient, unbiased; NaN below 2 prompts.
        products: [sites, K, K] inner products of the gradients summed over all prompts.
    """

    components: tuple[str, ...]
    raw: Float64[Tensor, "sites K"]
    debiased: Float64[Tensor, "sites K"]
    products: Float64[Tensor, "sites K K"]

    def at(self, site: int) -> RewardGradients:
        """One site, as a sum over sites of one."""
        return self.over([index == site for index in range(len(self.raw))])

    def over(self, chosen: Sequence[bool] | Bool[Tensor, " sites"]) -> RewardGradients:
        """The gradients of several sites taken as one vector: their energies add."""
        mask = torch.as_tensor(chosen, dtype=torch.bool)
        return RewardGradients(
            self.components,
            self.raw[mask].sum(dim=0, keepdim=True),
            self.debiased[mask].sum(dim=0, keepdim=True),
            self.products[mask].sum(dim=0, keepdim=True),
        )

    def norm_sq(self, component: str, site: int = 0) -> float | None:
        """Debiased squared norm; negative where noise outweighs signal, None where undefined."""
        return _defined(float(self.debiased[site, self.components.index(component)]))

    def raw_sq(self, component: str, site: int = 0) -> float | None:
        """Mean squared norm of one prompt's gradient; None where undefined."""
        return _defined(float(self.raw[site, self.components.index(component)]))

    def cosine(self, component: str, other: str, site: int = 0) -> float | None:
        """Cosine of two components' gradients, summed over prompts; None where one is zero."""
        k, other_k = self.components.index(component), self.components.index(other)
        products = self.products[site]
        norms = math.sqrt(max(float(products[k, k] * products[other_k, other_k]), 0.0))
        if norms == 0:
            return None
        return min(max(float(products[k, other_k]) / norms, -1.0), 1.0)


def reward_gradients(
    gram: Float64[Tensor, "sites N N"],
    component_advantages: Float64[Tensor, "K N"],
    prompts: Int[Tensor, " N"],
    *,
    components: Sequence[str],
) -> RewardGradients:
    """Norms and inner products of each component's gradient.

    Args:
        gram: Inner products of the sequences' gradients at unit advantage.
        component_advantages: Each component's share of the sequences' advantages, at weight 1
            where weights are to be judged.
        prompts: Which prompt each sequence answers.
        components: K names.
    """
    weights = component_advantages
    return RewardGradients(
        tuple(components),
        raw_energy(gram, weights, prompts),
        debiased_energy(gram, weights, prompts),
        weights @ gram @ weights.mT,
    )


def energy_shares(
    gradients: RewardGradients, weights: Mapping[str, float]
) -> dict[str, float | None]:
    """Each component's part of the update energy, w_k^2 |G_k|^2 / sum_j w_j^2 |G_j|^2.

    Args:
        gradients: Of one site (``over`` those that train).
        weights: In force, by component.

    Returns:
        Shares that add up to 1. A negative norm counts as 0; None where a norm is undefined, and
        for all where no component has any.
    """
    norms = {name: gradients.norm_sq(name) for name in gradients.components}
    energy = {
        name: None if norm is None else weights[name] ** 2 * max(norm, 0.0)
        for name, norm in norms.items()
    }
    total = sum(value for value in energy.values() if value is not None)
    return {
        name: None if value is None or total == 0 else value / total
        for name, value in energy.items()
    }


def _defined(value: float) -> float | None:
    return value if math.isfinite(value) else None
