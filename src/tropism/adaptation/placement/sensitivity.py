"""Ranks by importance, AdaLoRA-style: the control that truncates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import SIGNALS, Decision, PlacementObservation, PolicyState
from tropism.adaptation.evidence import Measured
from tropism.adaptation.plans import answer, hold, num_parameters, total_parameters, train
from tropism.adaptation.settings import require


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Measured):
    """Every linear trains, at a rank in proportion to its smoothed importance, within a budget.

    A site-level relative of AdaLoRA (2303.10512), not AdaLoRA. It differs in what is measured and
    in what is dropped:

    - AdaLoRA scores each singular component by |weight * gradient| of its entries, smoothed, times
      a smoothed uncertainty. An observation has one number per *linear*, so importance here is
      the average of ``signal`` over decisions, and there is no uncertainty term: a decision
      pools many probes where AdaLoRA looks at single steps.
    - AdaLoRA keeps the globally best components. Here each linear gets a *number* of them, in
      proportion to its importance (highest averages, d'Hondt), and its first components stay
      whichever they are. A is not kept orthogonal, so components are not singular ones.
    - AdaLoRA may prune a linear to rank 0; here ``min_rank`` components always stay.
    - AdaLoRA allocates every few steps without a test of significance; here ``min_z`` holds
      (set it to null for AdaLoRA's behaviour).

    Like AdaLoRA it cuts off what it drops, and the forward jumps: ``truncate`` in the value is
    True, for the caller to zero the dropped components instead of keeping them, and log the jump.

    Args:
        signal: Measure of importance.
        budget: Share of the parameters of all adapters at full rank that remains at the end.
        min_rank: Components that each linear keeps.
        start_rollout: The budget starts to fall here, from 1 ...
        end_rollout: ... and reaches ``budget`` here, along AdaLoRA's cubic.
    """

    signal: str = "debiased"
    budget: float = 0.5
    min_rank: int = 1
    start_rollout: int = 0
    end_rollout: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.signal in SIGNALS, self, "signal", f"choose from {SIGNALS}")
        require(0 < self.budget <= 1, self, "budget", "give a share in (0, 1]")
        require(self.min_rank >= 1, self, "min_rank", "give 1 or more")
        require(self.start_rollout >= 0, self, "start_rollout", "give 0 or more")
        is_ordered = self.end_rollout >= self.start_rollout
        require(is_ordered, self, "end_rollout", "give start_rollout or more")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Scores are the importances, 0 where negative; an undefined one gets as much as a 0.

        Raises:
            ValueError: The budget does not hold ``min_rank`` components of each linear.
        """
        if self.min_rank > self.budget * observation.max_rank:
            raise ValueError(
                f"Sensitivity.min_rank={self.min_rank}: a budget of {self.budget} of rank "
                f"{observation.max_rank} does not hold it; lower min_rank or raise the budget."
            )
        evidence = self.gather(observation, state, self.signal)
        scores = [None if m is None else max(0.0, m) for m in evidence.means[self.signal]]
        after = evidence.state
        if evidence.objection is not None:
            return hold(
                observation, evidence.objection, state=after, scores=scores, **evidence.numbers
            )
        share = self._share(observation.rollout)
        ranks = self._ranks(observation, scores, share * total_parameters(observation))
        plan = [
            train(site, ranks[i]) if site.can_train else site.plan
            for i, site in enumerate(observation.sites)
        ]
        used = [ranks[i] for i, site in enumerate(observation.sites) if site.can_train]
        reason = (
            f"{evidence.text}: ranks {min(used)} to {max(used)} by {self.signal} within "
            f"{share:.0%} of the parameters"
        )
        return answer(
            observation,
            plan,
            reason=reason,
            state=after,
            scores=scores,
            truncate=True,
            share=share,
            **evidence.numbers,
        )

    def _share(self, rollout: int) -> float:
        """AdaLoRA's schedule: budget + (1 - budget) (1 - progress)^3."""
        if rollout >= self.end_rollout:
            return self.budget
        length = self.end_rollout - self.start_rollout
        left = 1.0 - max(0, rollout - self.start_rollout) / length
        return self.budget + (1.0 - self.budget) * left * left * left

    def _ranks(
        self, observation: PlacementObservation, scores: Sequence[float | None], room: float
    ) -> list[int]:
        """Highest averages: the next component goes to the largest importance / (rank + 1)."""
        sites = observation.sites
        ranks = [self.min_rank if site.can_train else 0 for site in sites]
        room -= sum(num_parameters(site, self.min_rank) for site in sites if site.can_train)
        queue = [
            (-(scores[i] or 0.0) / (self.min_rank + 1), i)
            for i, site in enumerate(sites)
            if site.can_train
        ]
        heapq.heapify(queue)
        while queue:
            _, i = heapq.heappop(queue)
            size = num_parameters(sites[i], 1)
            if ranks[i] < observation.max_rank and size <= room:
                ranks[i] += 1
                room -= size
                heapq.heappush(queue, (-(scores[i] or 0.0) / (ranks[i] + 1), i))
        return ranks
