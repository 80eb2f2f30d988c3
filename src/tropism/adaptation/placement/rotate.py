"""Random placement that moves: the control for every map."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, PolicyState
from tropism.adaptation.plans import (
    answer,
    hold,
    is_training,
    num_parameters,
    resolve_rank,
    retire,
    total_parameters,
    train,
)
from tropism.adaptation.settings import require


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Random linears train, others after each dwell: capacity and switching without a map.

    Like LISA (2403.17919), but single linears rotate rather than layers, and none is always on.

    Args:
        num_sites: So many linears train. Give this or ``share``.
        share: Linears train until this share of all adapters' parameters is reached, never more.
        dwell: Decisions that a draw stays.
        seed_offset: Another one is another rotation in a run of the same seed.
        rank: Components of each adapter that train; None for all.
    """

    num_sites: int | None = None
    share: float | None = None
    dwell: int = 1
    seed_offset: int = 0
    rank: int | None = None

    def __post_init__(self) -> None:
        is_one = (self.num_sites is None) != (self.share is None)
        require(is_one, self, "num_sites", f"with share={self.share!r}, give exactly one of both")
        require(self.num_sites is None or self.num_sites >= 1, self, "num_sites", "give 1 or more")
        require(self.share is None or 0 < self.share <= 1, self, "share", "give a share in (0, 1]")
        require(self.dwell >= 1, self, "dwell", "give 1 or more")
        require(self.seed_offset >= 0, self, "seed_offset", "give 0 or more")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Draws anew every ``dwell`` decisions.

        Raises:
            ValueError: More linears than have adapters, or a share that holds none.
        """
        age = int(state.get("age", self.dwell))
        if age < self.dwell:
            reason = f"random linears, drawn {age} of {self.dwell} decisions ago"
            return hold(observation, reason, state={"age": age + 1})
        rank = resolve_rank(self.rank, observation)
        candidates = [i for i, site in enumerate(observation.sites) if site.can_train]
        own = np.random.default_rng([self.seed_offset, int(rng.integers(2**32))])
        order = [candidates[i] for i in own.permutation(len(candidates))]
        chosen = self._take(observation, order, rank)
        now = {i for i, site in enumerate(observation.sites) if is_training(site)}
        plan = [
            (train(site, rank) if i in chosen else retire(site, observation))
            if site.can_train
            else site.plan
            for i, site in enumerate(observation.sites)
        ]
        reason = f"{len(chosen)} random linears train, {len(chosen - now)} of them new"
        return answer(observation, plan, reason=reason, state={"age": 1})

    def _take(self, observation: PlacementObservation, order: list[int], rank: int) -> set[int]:
        if self.num_sites is not None:
            if self.num_sites > len(order):
                raise ValueError(
                    f"Rotate.num_sites={self.num_sites}: {len(order)} linears have adapters; give "
                    "at most that."
                )
            return set(order[: self.num_sites])
        assert self.share is not None
        room = self.share * total_parameters(observation)
        chosen = set()
        for i in order:
            size = num_parameters(observation.sites[i], rank)
            if size <= room:
                chosen.add(i)
                room -= size
        if not chosen:
            raise ValueError(f"Rotate.share={self.share}: no linear is so small; give more.")
        return chosen
