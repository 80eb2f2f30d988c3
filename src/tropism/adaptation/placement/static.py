"""Plans that no measurement moves: the baselines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tropism.adaptation.contracts import (
    Decision,
    PlacementObservation,
    PolicyState,
    SiteObservation,
)
from tropism.adaptation.plans import answer, hold, is_training, resolve_rank, retire, train
from tropism.adaptation.settings import require

Third = Literal["bottom_third", "middle_third", "top_third"]


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """All linears that have an adapter train alike: the baseline to beat.

    Args:
        rank: Components of each adapter that train; None for all.
    """

    rank: int | None = None

    def __post_init__(self) -> None:
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Decides once, then holds."""
        if state.get("is_done"):
            return hold(observation, "uniform, decided once", state=state)
        rank = resolve_rank(self.rank, observation)
        plan = [train(site, rank) if site.can_train else site.plan for site in observation.sites]
        num_sites = sum(site.can_train for site in observation.sites)
        reason = f"all {num_sites} linears train at rank {rank}"
        return answer(observation, plan, reason=reason, state={"is_done": True})


@dataclass(frozen=True, kw_only=True)
class Static:
    """Chosen modules of chosen layers train alike, from the first decision on.

    Args:
        modules: Labels as in the records (``q_proj``); None for all.
        layers: Indices, or a third of the layers (with 30 layers ``top_third`` is 20 to 29; with
            31 the middle one has 11); None for all, and for linears outside the layers too.
        sites: Keys as in the records (``3.q_proj``), or a text file with one a line, read once,
            when the policy is made; None for all.
        rank: Components of each adapter that train; None for all.
    """

    modules: tuple[str, ...] | None = None
    layers: tuple[int, ...] | Third | None = None
    sites: tuple[str, ...] | str | None = None
    rank: int | None = None
    keys: frozenset[str] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        require(self.modules is None or len(self.modules) > 0, self, "modules", "name some")
        require(self.layers is None or len(self.layers) > 0, self, "layers", "name some")
        is_known = not isinstance(self.layers, str) or self.layers in get_args(Third)
        require(is_known, self, "layers", f"give indices or one of {get_args(Third)}")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")
        if self.sites is not None:
            object.__setattr__(self, "keys", self._read_sites(self.sites))

    def _read_sites(self, sites: tuple[str, ...] | str) -> frozenset[str]:
        if isinstance(sites, str):
            file = Path(sites)
            require(file.is_file(), self, "sites", "there is no such file; name one, or list keys")
            sites = tuple(file.read_text(encoding="utf-8").split())
        require(len(sites) > 0, self, "sites", "name some")
        return frozenset(sites)

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Decides once, then holds.

        Raises:
            ValueError: A module, layer or site that matches no linear with an adapter.
        """
        if state.get("is_done"):
            return hold(observation, "static, decided once", state=state)
        rank = resolve_rank(self.rank, observation)
        layers = self._layers(observation)
        chosen = [self._is_chosen(site, layers) for site in observation.sites]
        self._require_matches(observation, chosen, layers)
        plan = [
            train(site, rank) if is_chosen else retire(site, observation)
            for site, is_chosen in zip(observation.sites, chosen, strict=True)
        ]
        reason = (
            f"{sum(chosen)} of {sum(site.can_train for site in observation.sites)} linears train "
            f"at rank {rank} ({sum(is_training(site) for site in observation.sites)} before)"
        )
        return answer(observation, plan, reason=reason, state={"is_done": True})

    def _is_chosen(self, site: SiteObservation, layers: frozenset[int] | None) -> bool:
        plan = site.plan
        return (
            site.can_train
            and _is_in(plan.module, self.modules)
            and _is_in(plan.layer, layers)
            and _is_in(plan.key, self.keys)
        )

    def _layers(self, observation: PlacementObservation) -> frozenset[int] | None:
        if self.layers is None:
            return None
        if not isinstance(self.layers, str):
            return frozenset(self.layers)
        present = sorted({s.plan.layer for s in observation.sites if s.plan.layer is not None})
        third = {"bottom_third": 0, "middle_third": 1, "top_third": 2}[self.layers]
        return frozenset(
            layer for i, layer in enumerate(present) if _third(i, len(present)) == third
        )

    def _require_matches(
        self,
        observation: PlacementObservation,
        chosen: list[bool],
        layers: frozenset[int] | None,
    ) -> None:
        plans = [
            s.plan for s, is_chosen in zip(observation.sites, chosen, strict=True) if is_chosen
        ]
        for setting, wanted, found, known in (
            ("modules", self.modules, {p.module for p in plans}, "module"),
            ("layers", layers, {p.layer for p in plans}, "layer"),
            ("sites", self.keys, {p.key for p in plans}, "key"),
        ):
            if missing := [item for item in wanted or () if item not in found]:
                there = {getattr(s.plan, known) for s in observation.sites if s.can_train}
                raise ValueError(
                    f"Static.{setting}: {missing} match no linear with an adapter in this choice; "
                    f"adapters are at {sorted(there, key=str)}."
                )


def _is_in(item: object, chosen: Collection[object] | None) -> bool:
    return chosen is None or item in chosen


def _third(index: int, count: int) -> int:
    """0 below a third of the way, 2 from two thirds on, 1 between."""
    return 0 if 3 * index < count else 2 if 3 * index >= 2 * count else 1
