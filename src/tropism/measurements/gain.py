"""What each linear's last steps gained, measured on completions that they have not seen.

With D_l the move of linear l's effective weight in the last update, completion i's log-probability
has changed by d_il = <grad_l log pi(y_i), D_l> to first order, and the objective by

    gain_l = mean over prompts of sum_i w_i (a_i - mean a) (d_il - mean d_l)

with a_i the advantages and w_i the weight of a row in the loss. Differences from the pressure of
the reward on a linear (``pressure.py``):
1. it asks one direction, the one that was taken, and not all of them: a single number for each
   row, so that the noise of a few dozen rows is no match for it (z of 3 from 8 prompts, where the
   debiased energy needs 24);
2. moves add up over linears as d_i = sum_l d_il, and so does the KL that they cost to second order,
   sum_l kl_l = 1/2 mean_i d_i^2 with kl_l = 1/2 mean_i d_il d_i. Much of it belongs to no linear
   alone, because all linears push the same completions (``shared_kl``).

The null deals advantages out anew within each prompt; the gain is linear in them, so its variance
under the null has a closed form (that of a sample without replacement) and needs no draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tropism.measurements.layer_names import LinearSite
from tropism.measurements.records import TABLES
from tropism.measurements.sketches import Measure, SiteGradients


@dataclass(frozen=True)
class Move:
    """The change of one effective weight, D = left @ right, in fp32.

    Args:
        left: [d_out, r].
        right: [r, d_in].
        lr_scale: The factor of its step size then.
    """

    left: Float[Tensor, "d_out r"]
    right: Float[Tensor, "r d_in"]
    lr_scale: float = 1.0


class WithMoves:
    """Another measure, and how far moves carry each row, from the same backward.

    Args:
        measure: What is kept of each sequence.
        moves: By key of the linear; others do not move.
    """

    def __init__(self, measure: Measure, moves: Mapping[str, Move]) -> None:
        self.measure, self.moves = measure, moves
        self.along: dict[str, Float[Tensor, " m"]] = {}
        """<gradient of each row's loss, D>, by key of the linear."""

    def nothing(self, num_rows: int, d_out: int, d_in: int, *, is_summed: bool) -> SiteGradients:
        """See ``Measure``."""
        return self.measure.nothing(num_rows, d_out, d_in, is_summed=is_summed)

    def __call__(
        self,
        key: str,
        delta: Float[Tensor, "m S d_out"],
        x: Float[Tensor, "m S d_in"],
        row_weights: Float[Tensor, " m"] | None,
    ) -> SiteGradients:
        """See ``Measure``."""
        if (move := self.moves.get(key)) is not None:
            # (m, S, r) each; in fp32, as moves are small beside what they move.
            out, into = delta.float() @ move.left, x.float() @ move.right.mT
            along = (out * into).sum(dim=(1, 2)).cpu()
            self.along[key] = along + self.along[key] if key in self.along else along
        return self.measure(key, delta, x, row_weights)


@dataclass(frozen=True)
class SiteGain:
    """One linear; None where it did not move.

    Args:
        layer: Decoder layer, None outside the layers.
        module: Label of the linear within its layer.
        gain: What its move added to the objective, per unit of ``lr_scale``.
        gain_z: Standard deviations of that above 0 under permuted advantages.
        kl: Its part of the update's KL, nats per completion, cross terms halved between the two.
        probes_pooled: Probes behind the numbers.
    """

    layer: int | None
    module: str
    gain: float | None
    gain_z: float | None
    kl: float | None
    probes_pooled: int

    def record(self) -> dict[str, Any]:
        """A row of the ``gains`` table."""
        return {column: getattr(self, column) for column in TABLES["gains"]}


@dataclass(frozen=True)
class GainEstimate:
    """What the last updates gained.

    Args:
        sites: Every linear.
        z: Of the sum over linears.
        kl: Of an update, nats per completion, to second order.
        shared_kl: Its part that is there only because linears push the same completions.
    """

    sites: tuple[SiteGain, ...]
    z: float | None
    kl: float | None
    shared_kl: float | None


@dataclass(frozen=True)
class _Prompt:
    moved: Float64[Tensor, "m sites"]
    weights: Float64[Tensor, " m"]
    advantages: Float64[Tensor, " m"]
    scales: Float64[Tensor, " sites"]
    probe: int


class GainPool:
    """Gathers probed prompts; lives on the CPU.

    Args:
        sites: Every linear.
    """

    def __init__(self, sites: Sequence[LinearSite]) -> None:
        self.sites = tuple(sites)
        self._prompts: list[_Prompt] = []

    def new_pool(self) -> None:
        """Forget all probes."""
        self._prompts = []

    def add(
        self,
        measured: WithMoves,
        *,
        weights: Float[Tensor, " m"],
        advantages: Float[Tensor, " m"],
        probe: int,
    ) -> None:
        """Pool one prompt.

        Args:
            measured: Of a backward of the rows' losses -w_i log pi(y_i).
            weights: w_i; rows of weight 0 are left out.
            advantages: Within their whole group.
            probe: Which probe (rollout) the prompt belongs to.
        """
        rows = weights.detach().cpu() > 0
        empty = torch.zeros(len(rows))
        losses = torch.stack([measured.along.get(site.key, empty) for site in self.sites], dim=1)
        kept = weights.detach().cpu()[rows].double()
        moves = [measured.moves.get(site.key) for site in self.sites]
        self._prompts.append(
            _Prompt(
                -losses[rows].double() / kept[:, None],
                kept,
                advantages.detach().cpu()[rows].double(),
                torch.tensor([0.0 if m is None else m.lr_scale for m in moves]).double(),
                probe,
            )
        )

    def estimate(self) -> GainEstimate:
        """Every linear's gain, and what the updates cost together."""
        # The last column is the move of all linears together.
        gain, variance = torch.zeros(2, len(self.sites) + 1, dtype=torch.float64)
        for prompt in self._prompts:
            per_scale = torch.where(prompt.scales > 0, prompt.moved / prompt.scales, 0.0)
            together = prompt.moved.sum(dim=1, keepdim=True)
            its_gain, its_variance = _within(
                torch.cat([per_scale, together], dim=1), prompt.weights * prompt.advantages
            )
            gain, variance = gain + its_gain, variance + its_variance
        num = len(self._prompts)
        kl, shared = self._costs()
        moved_at = [prompt.scales.gt(0).tolist() for prompt in self._prompts]
        has_moved = [any(column) for column in zip(*moved_at, strict=True)] or [False] * len(kl)
        probes = len({prompt.probe for prompt in self._prompts})
        sites = tuple(
            SiteGain(
                site.layer,
                site.module,
                gain=float(gain[i]) / num if has_moved[i] else None,
                gain_z=_z(float(gain[i]), float(variance[i])),
                kl=float(kl[i]) if has_moved[i] else None,
                probes_pooled=probes,
            )
            for i, site in enumerate(self.sites)
        )
        return GainEstimate(
            sites,
            z=_z(float(gain[-1]), float(variance[-1])),
            kl=float(kl.sum()) if num else None,
            shared_kl=shared,
        )

    def records(self) -> list[dict[str, Any]]:
        """Rows of the ``moves`` table, one per probed completion.

        ``prompt`` numbers the prompts of the pool, ``advantage`` is w_i (a_i - mean a), ``changes``
        are the d_il in the order of the linears.
        """
        rows = []
        for index, prompt in enumerate(self._prompts):
            weighted = prompt.weights * prompt.advantages
            for advantage, changes in zip(weighted - weighted.mean(), prompt.moved, strict=True):
                short = [float(f"{change:.5g}") for change in changes.tolist()]
                rows.append({"prompt": index, "advantage": float(advantage), "changes": short})
        return rows

    def _costs(self) -> tuple[Float64[Tensor, " sites"], float | None]:
        """Each linear's part of the KL, and the share of the whole that cross terms are."""
        nothing = torch.zeros(0, len(self.sites), dtype=torch.float64)
        moved = torch.cat([nothing, *(prompt.moved for prompt in self._prompts)])  # (N, sites)
        num = max(1, len(moved))
        kl = 0.5 * (moved * moved.sum(dim=1, keepdim=True)).sum(dim=0) / num
        alone = 0.5 * float(moved.square().sum()) / num
        together = float(kl.sum())
        return kl, 1.0 - alone / together if together > 0 else None

    def state_dict(self) -> list[dict[str, Any]]:
        """All that a resumed run needs."""
        return [dict(vars(prompt)) for prompt in self._prompts]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore what ``state_dict`` gave."""
        self._prompts = [_Prompt(**prompt) for prompt in state]


def _within(
    moved: Float64[Tensor, "m sites"], weighted: Float64[Tensor, " m"]
) -> tuple[Float64[Tensor, " sites"], Float64[Tensor, " sites"]]:
    """Sum of products about the means, and its variance where ``weighted`` is dealt out anew."""
    num = len(weighted)
    if num < 2:
        nothing = torch.zeros(moved.shape[1], dtype=torch.float64)
        return nothing, nothing
    about, to = weighted - weighted.mean(), moved - moved.mean(dim=0)
    return about @ to, about.square().sum() * to.square().sum(dim=0) / (num - 1)


def _z(value: float, variance: float) -> float | None:
    return value / math.sqrt(variance) if variance > 0 else None
