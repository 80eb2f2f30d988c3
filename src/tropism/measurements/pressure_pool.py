"""Probes of single prompts, pooled until there are enough to tell signal from noise.

All probes of a pool share their sketching matrices, because a U-statistic needs *all* pairs of
prompts, across probes too. ``new_pool`` draws new matrices: the sketch's own error then does not
persist from decision to decision, as with matrices keyed by the linear alone, nor is a pair of
probes lost, as with matrices keyed by the probe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tropism.measurements.captured_energy import captured_energy
from tropism.measurements.gradient_probe import RowGradients
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.pressure import PressureEstimate, estimate_pressure
from tropism.measurements.pressure_statistics import gram_matrices
from tropism.measurements.reward_gradients import RewardGradients, reward_gradients
from tropism.measurements.sketches import Sketch, keyed_bits


@dataclass(frozen=True)
class _Prompt:
    """One probed prompt; ``rows`` holds the features of all linears side by side."""

    rows: Float[Tensor, "m features"]
    advantages: Float64[Tensor, " m"]
    components: Float64[Tensor, "K m"]
    probe: int


class PressurePool:
    """Gathers probes and estimates the pressure from them; lives on the CPU.

    A probe is what is measured on one rollout batch: one prompt or several.

    Args:
        sites: Every linear that is probed.
        shapes: (d_out, d_in) of each.
        components: Names of the reward components, K.
        max_rows: Sequences kept; the oldest prompts leave first, whole. A probe of weights that
            have moved on is one of another gradient, so this bounds staleness as well as memory.
        sketch_size: k.
        seed: The run's seed.

    Raises:
        ValueError: A size that is not positive.
    """

    def __init__(
        self,
        sites: Sequence[LinearSite],
        shapes: Sequence[tuple[int, int]],
        *,
        components: Sequence[str] = (),
        max_rows: int = 96,
        sketch_size: int = 32,
        seed: int = 0,
    ) -> None:
        if max_rows < 2:
            raise ValueError(f"max_rows={max_rows}: keep at least 2 completions.")
        self.sites = tuple(sites)
        self.shapes = tuple(shapes)
        self.components = tuple(components)
        self.max_rows = max_rows
        self.seed = seed
        self.sketch = Sketch(sketch_size, seed=seed)
        self._widths: tuple[int, ...] = ()
        self._prompts: list[_Prompt] = []
        self._summed: list[Tensor] = []
        self._gram: Tensor | None = None

    # -- filling ------------------------------------------------------------------------------

    def new_pool(self) -> None:
        """Forget all probes and draw new sketching matrices: after a decision."""
        self.sketch = Sketch(self.sketch.size, seed=self.seed, pool=self.sketch.pool + 1)
        self._prompts, self._summed, self._gram = [], [], None

    def add(
        self,
        gradients: RowGradients,
        *,
        advantages: Float[Tensor, " m"],
        component_advantages: Float[Tensor, "K m"] | None = None,
        probe: int,
    ) -> None:
        """Pool one prompt.

        Args:
            gradients: Of m of its completions at unit advantage, made with ``self.sketch``. Their
                ``summed``, if any, must be weighted by ``advantages``; it stays in the captured
                energy until ``new_pool``.
            advantages: Of the m completions, within their whole group.
            component_advantages: Each component's own share of the advantages.
            probe: Which probe it belongs to (the rollout): one may have several prompts.

        Raises:
            ValueError: Shapes that do not fit, or more completions than the pool may keep.
        """
        num_rows = len(advantages)
        if num_rows > self.max_rows:
            raise ValueError(
                f"max_rows={self.max_rows} is less than the {num_rows} completions of one prompt: "
                "raise it, or probe fewer completions."
            )
        if component_advantages is None:
            component_advantages = advantages.new_zeros(len(self.components), num_rows)
        if component_advantages.shape != (len(self.components), num_rows):
            raise ValueError(
                f"component_advantages has shape {tuple(component_advantages.shape)}: give one row "
                f"for each of {list(self.components)} and one column for each completion."
            )
        if len(gradients.rows) != len(self.sites):
            raise ValueError(f"{len(gradients.rows)} gradients for {len(self.sites)} linears.")
        self._widths = tuple(rows.shape[1] for rows in gradients.rows)
        self._prompts.append(
            _Prompt(
                torch.cat([rows.cpu() for rows in gradients.rows], dim=1),
                advantages.detach().cpu().double(),
                component_advantages.detach().cpu().double(),
                probe,
            )
        )
        while self.num_rows > self.max_rows:
            del self._prompts[0]
        if gradients.summed:
            new = [summed.cpu() for summed in gradients.summed]
            old = self._summed
            self._summed = [a + b for a, b in zip(old, new, strict=True)] if old else new
        self._gram = None

    @property
    def num_rows(self) -> int:
        """Sequences in the pool."""
        return sum(len(prompt.advantages) for prompt in self._prompts)

    @property
    def num_prompts(self) -> int:
        """Prompts in the pool."""
        return len(self._prompts)

    @property
    def probes_pooled(self) -> int:
        """Probes in the pool."""
        return len({prompt.probe for prompt in self._prompts})

    # -- reading ------------------------------------------------------------------------------

    def estimate(
        self, *, rank: int = 16, is_gradient_subspace: bool = False, num_permutations: int = 200
    ) -> PressureEstimate:
        """The pressure at every linear.

        Args:
            rank: r of the adapters, for captured energy and gain.
            is_gradient_subspace: Whether adapters start in the gradient's subspace; else in a
                random one.
            num_permutations: Of the null; which ones depends on seed, pool and probes alone.
        """
        probes = [prompt.probe for prompt in self._prompts]
        key = (self.seed, self.sketch.pool, "permutations", *probes)
        return estimate_pressure(
            self.gram(),
            advantages=self._advantages(),
            prompts=self._labels(range(len(self._prompts))),
            probes=self._labels(probes),
            sites=self.sites,
            shapes=self.shapes,
            rank=rank,
            captured=[captured_energy(summed, rank) for summed in self._summed]
            or [None] * len(self.sites),
            is_gradient_subspace=is_gradient_subspace,
            num_permutations=num_permutations,
            rng=np.random.Generator(keyed_bits(*key)),
        )

    def reward_gradients(self) -> RewardGradients:
        """Norms and cosines of each reward component's gradient at every linear."""
        shares = [prompt.components for prompt in self._prompts]
        empty = torch.zeros(len(self.components), 0, dtype=torch.float64)
        return reward_gradients(
            self.gram(),
            torch.cat([empty, *shares], dim=1),
            self._labels(range(len(self._prompts))),
            components=self.components,
        )

    def gram(self) -> Float64[Tensor, "sites N N"]:
        """Inner products of the pooled gradients at unit advantage, made once."""
        if self._gram is None:
            if self._prompts:
                rows = torch.cat([prompt.rows for prompt in self._prompts])
                self._gram = gram_matrices(rows.split(self._widths, dim=1))
            else:
                self._gram = torch.zeros(len(self.sites), 0, 0, dtype=torch.float64)
        return self._gram

    def _advantages(self) -> Float64[Tensor, " N"]:
        empty = torch.zeros(0, dtype=torch.float64)
        return torch.cat([empty, *(prompt.advantages for prompt in self._prompts)])

    def _labels(self, labels: Sequence[int]) -> Int[Tensor, " N"]:
        """One label per prompt, repeated for each of its rows."""
        counts = torch.tensor([len(prompt.advantages) for prompt in self._prompts]).long()
        return torch.tensor(list(labels)).long().repeat_interleave(counts)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bit for bit."""
        return {
            "sites": [site.key for site in self.sites],
            "components": list(self.components),
            "sketch": (self.sketch.size, self.sketch.seed, self.sketch.pool),
            "widths": self._widths,
            "prompts": [vars(prompt) for prompt in self._prompts],
            "summed": list(self._summed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ValueError: It belongs to other linears, components, sketches or another seed.
        """
        size, seed, pool = state["sketch"]
        saved = (state["sites"], state["components"], size, seed)
        own = ([s.key for s in self.sites], list(self.components), self.sketch.size, self.seed)
        names = ("linears", "components", "sketch_size", "seed")
        for name, before, now in zip(names, saved, own, strict=True):
            if before != now:
                raise ValueError(
                    f"the saved pressure pool has other {name} ({before}) than this run ({now}): "
                    "resume with the config of the run that saved it."
                )
        self.sketch = Sketch(size, seed=seed, pool=pool)
        self._widths = tuple(state["widths"])
        self._prompts = [_Prompt(**prompt) for prompt in state["prompts"]]
        self._summed = list(state["summed"])
        self._gram = None
