"""Probes of a rollout batch: which completions, what loss, into which pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from tropism.measurements.alignment import Moments, WithMoments, alignment, misalignment
from tropism.measurements.gain import GainPool, Move, WithMoves
from tropism.measurements.gradient_probe import GradientProbe, linear_shape
from tropism.measurements.pressure_pool import PressurePool
from tropism.measurements.probe_rows import ProbeRows, choose_probe_rows
from tropism.measurements.sketches import Measure
from tropism.measurements.static_scores import plop, weight_norm
from tropism.objective.advantages import component_shares
from tropism.objective.settings import Objective
from tropism.policy import Policy
from tropism.rollouts.collate import rows_of
from tropism.rollouts.engine import Sampling
from tropism.types import RolloutBatch
from tropism.update import row_weights

_DRAW = 0x9B0BE  # keeps these draws apart from others of the same seed and rollout


class Prober:
    """Measures the policy gradient of single completions at every linear, into a pool.

    The loss is that of a first update (ratio 1): token weight times log-probability, at unit
    advantage. The prompt runs in every row, so that what flows back to it is known row by row.

    Args:
        policy: Whose linears, all of them.
        objective: Weighs tokens and components.
        sampling: Temperature and completion limit.
        components: Names of the reward components.
        num_prompts: Prompts of one probe.
        num_completions: Completions of each.
        choice: ``contrast`` or ``uniform``.
        max_rows: Most completions in the pool.
        sketch_size: k.
        seed: Of the run.
        should_align: Also gather what ``misalignment`` needs.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        sampling: Sampling,
        *,
        components: tuple[str, ...],
        num_prompts: int,
        num_completions: int,
        choice: Literal["contrast", "uniform"],
        max_rows: int,
        sketch_size: int,
        seed: int,
        should_align: bool = False,
    ) -> None:
        self.policy, self.objective, self.sampling = policy, objective, sampling
        self.num_prompts, self.num_completions = num_prompts, num_completions
        self.choice: Literal["contrast", "uniform"] = choice
        self.seed = seed
        self.moments = Moments() if should_align else None
        self.gains = GainPool(policy.sites)
        self.linears = [(site, policy.linear(site)) for site in policy.sites]
        self.pool = PressurePool(
            policy.sites,
            [linear_shape(linear) for _, linear in self.linears],
            components=components,
            max_rows=max_rows,
            sketch_size=sketch_size,
            seed=seed,
        )

    def probe(
        self,
        batch: RolloutBatch,
        weights: Mapping[str, float],
        moves: Mapping[str, Move] | None = None,
    ) -> None:
        """Add this batch's probe to the pool; none where no group has signal.

        Args:
            batch: Scored, not trained on yet.
            weights: Of the reward components, now.
            moves: Of the last update, where what it gained is measured too.
        """
        shares = component_shares(
            batch.components,
            rewards=batch.rewards,
            weights=weights,
            group_size=batch.group_size,
            scale=self.objective.scale,
            aggregation=self.objective.aggregation,
        )
        by_component = torch.stack([shares[name] for name in self.pool.components])  # (K, B)
        for chosen in choose_probe_rows(
            batch.advantages,
            group_size=batch.group_size,
            num_prompts=self.num_prompts,
            num_completions=self.num_completions,
            rng=np.random.default_rng([self.seed, batch.rollout, _DRAW]),
            choice=self.choice,
        ):
            self._probe_prompt(batch, chosen, by_component, moves or {})

    def _probe_prompt(
        self,
        batch: RolloutBatch,
        chosen: ProbeRows,
        by_component: torch.Tensor,
        moves: Mapping[str, Move],
    ) -> None:
        policy, rows = self.policy, list(chosen.rows)
        limit = self.sampling.max_new_tokens
        weights = row_weights(batch, self.objective, max_completion_length=limit)[rows]
        part = rows_of(batch.rollouts, rows, pad_token_id=policy.pad_token_id).to(policy.device)
        advantages = batch.advantages[rows]
        embedding = policy.base.get_input_embeddings()
        measure: Measure = self.pool.sketch
        if self.moments is not None:
            measure = WithMoments(measure, self.moments)
        measure = along = WithMoves(measure, moves)
        with GradientProbe(self.linears, embedding, measure) as probe:
            logprobs, _ = policy.completion_logprobs(part, temperature=self.sampling.temperature)
            loss = -(weights.to(policy.device) * logprobs.sum(dim=1)).sum()
            gradients = probe.backward(loss, row_weights=advantages)
        self.pool.add(
            gradients,
            advantages=advantages,
            component_advantages=by_component[:, rows],
            probe=batch.rollout,
        )
        if moves:
            self.gains.add(along, weights=weights, advantages=advantages, probe=batch.rollout)

    def misalignment(self) -> dict[str, float | None]:
        """How little each linear fits its surroundings, by its key; over all probes so far."""
        assert self.moments is not None
        found = {
            site.key: alignment(
                self.policy.weight(site),
                self.moments.inputs(site.key),
                self.moments.gradients(site.key),
            )
            for site in self.policy.sites
        }
        scores = misalignment(found, self.policy.sites)
        return {site.key: score for site, score in zip(self.policy.sites, scores, strict=True)}

    def static_scores(self, batch: RolloutBatch) -> dict[str, dict[str, float | None]]:
        """PLoP on the first prompt's completions, and weight norms, by key of the linear."""
        policy = self.policy
        rows = range(batch.group_size)
        part = rows_of(batch.rollouts, rows, pad_token_id=policy.pad_token_id).to(policy.device)

        def forward() -> None:
            with torch.no_grad(), policy.merged():
                policy.completion_logprobs(part, temperature=1.0)

        scores = plop(self.linears, forward)
        return {
            site.key: {"plop": score, "weight_norm": weight_norm(policy.weight(site))}
            for (site, _), score in zip(self.linears, scores, strict=True)
        }
