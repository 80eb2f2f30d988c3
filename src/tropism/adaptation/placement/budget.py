"""The best-scoring linears train, within a budget of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tropism.adaptation.contracts import SIGNALS, Decision, PlacementObservation, PolicyState
from tropism.adaptation.evidence import Measured
from tropism.adaptation.plans import (
    answer,
    hold,
    is_training,
    layers_of,
    num_parameters,
    resolve_rank,
    retire,
    total_parameters,
    train,
)
from tropism.adaptation.settings import require

RANK_VARIANT = ("raw", "debiased", "update_norm", "gain")
"""They grow with a linear's size, or with what its adapter was given before: rich-get-richer."""

NON_NEGATIVE = ("debiased", "snr", "captured_gain")
"""Estimates of something that cannot be negative: a negative value counts as 0."""


@dataclass(frozen=True, kw_only=True)
class TopBudget(Measured):
    """The linears with the highest scores train, as many as the budget holds.

    Linears enter in the order of their averaged score, and one that no longer fits is passed over
    for smaller ones: the budget is never exceeded. Those that leave are kept as they are
    (KEEP), and OFF where they never trained. A linear with an undefined score stays as it is.

    *Floor*, against starved layers: each layer first trains its own best linears until they hold
    ``floor`` of that layer's parameters, or as near as whole linears come to it without taking
    more than ``budget`` of the layer. So every layer always trains something, the floors together
    never exceed the budget, and floor = budget gives each layer the same share.

    *Dwell*: a linear that entered or left stays so for ``dwell`` decisions, the one that moved it
    and held ones included; if the guard moves it back, it stays there for as many more.
    *Hysteresis*: an outsider must score higher than a linear that trains by this share of it.

    Args:
        signal: What scores. Signals that grow with rank or size are refused.
        budget: Share of the parameters of all adapters at full rank, in (0, 1].
        floor: Share of each layer's parameters that trains in any case, in [0, budget]; 0: none.
        dwell: Decisions.
        hysteresis: Relative margin, >= 0.
        rank: Components of each adapter that train; None for all.
        allow_rank_variant: Accept ``raw``, ``debiased`` and ``update_norm`` all the same.
    """

    signal: str = "snr"
    budget: float = 0.5
    floor: float = 0.1
    dwell: int = 2
    hysteresis: float = 0.1
    rank: int | None = None
    allow_rank_variant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.signal in SIGNALS, self, "signal", f"choose from {SIGNALS}")
        require(
            self.allow_rank_variant or self.signal not in RANK_VARIANT,
            self,
            "signal",
            "it grows with rank or size, so that what trains would go on training; choose from "
            f"{[s for s in SIGNALS if s not in RANK_VARIANT]}, or set allow_rank_variant",
        )
        require(0 < self.budget <= 1, self, "budget", "give a share in (0, 1]")
        require(0 <= self.floor <= self.budget, self, "floor", "give a share in [0, budget]")
        require(self.dwell >= 0, self, "dwell", "give 0 or more")
        require(0 <= self.hysteresis < math.inf, self, "hysteresis", "give 0 or more")
        require(self.rank is None or self.rank >= 1, self, "rank", "give 1 or more, or null")

    def decide(
        self, observation: PlacementObservation, state: PolicyState, rng: np.random.Generator
    ) -> Decision:
        """Scores are the averages of ``signal``.

        Raises:
            ValueError: The budget does not hold the smallest linear of each layer.
        """
        rank = resolve_rank(self.rank, observation)
        self._require_room(observation, rank)
        evidence = self.gather(observation, state, self.signal)
        scores = [
            max(0.0, mean) if mean is not None and self.signal in NON_NEGATIVE else mean
            for mean in evidence.means[self.signal]
        ]
        clock = self._clock(observation, state)
        after = {**evidence.state, "clock": clock}
        if evidence.objection is not None:
            return hold(
                observation, evidence.objection, state=after, scores=scores, **evidence.numbers
            )
        chosen = self._choose(observation, scores, clock, rank)
        if not chosen:
            lack = "linears that must stay exceed" if chosen is None else "no linear fits into"
            reason = f"{evidence.text}, but {lack} the budget"
            return hold(observation, reason, state=after, scores=scores, **evidence.numbers)
        plan = [
            (train(site, rank) if i in chosen else retire(site, observation))
            if site.can_train
            else site.plan
            for i, site in enumerate(observation.sites)
        ]
        now = {i for i, site in enumerate(observation.sites) if is_training(site)}
        for i in chosen ^ now:
            clock[observation.sites[i].plan.key] = [i in chosen, 0]
        used = sum(num_parameters(observation.sites[i], rank) for i in chosen)
        share = used / total_parameters(observation)
        reason = (
            f"{evidence.text}: {len(chosen)} linears by {self.signal} hold {share:.0%} of the "
            f"parameters, {len(chosen - now)} enter and {len(now - chosen)} leave"
        )
        return answer(
            observation,
            plan,
            reason=reason,
            state=after,
            scores=scores,
            share=share,
            **evidence.numbers,
        )

    def _require_room(self, observation: PlacementObservation, rank: int) -> None:
        for layer, sites in layers_of(observation).items():
            sizes = [num_parameters(observation.sites[i], rank) for i in sites]
            whole = sum(num_parameters(observation.sites[i], observation.max_rank) for i in sites)
            if self.floor > 0 and min(sizes) > self.budget * whole:
                raise ValueError(
                    f"TopBudget.budget={self.budget}: the smallest linear of layer {layer} holds "
                    f"{min(sizes) / whole:.3f} of the layer's parameters; raise the budget, lower "
                    "the rank, or set floor to 0."
                )

    def _clock(self, observation: PlacementObservation, state: PolicyState) -> dict[str, Any]:
        """Site key -> [trains, decisions since that changed]; free to move on first sight."""
        before: Mapping[str, Any] = state.get("clock", {})
        clock: dict[str, Any] = {}
        for site in observation.sites:
            if site.can_train:
                was_training, age = before.get(site.plan.key, (is_training(site), self.dwell))
                is_moved = was_training != is_training(site)
                clock[site.plan.key] = [is_training(site), 0 if is_moved else age + 1]
        return clock

    def _choose(
        self,
        observation: PlacementObservation,
        scores: Sequence[float | None],
        clock: Mapping[str, Any],
        rank: int,
    ) -> set[int] | None:
        """Indices of the sites that are to train; None where locked ones exceed the budget."""
        sites = observation.sites
        size = [num_parameters(site, rank) for site in sites]
        is_free = [
            site.can_train and score is not None and clock[site.plan.key][1] >= self.dwell
            for site, score in zip(sites, scores, strict=True)
        ]
        locked = {i for i, site in enumerate(sites) if is_training(site) and not is_free[i]}
        room = self.budget * total_parameters(observation) - sum(size[i] for i in locked)
        if room < 0:
            return None

        def rank_order(i: int) -> tuple[float, bool, int]:
            score = scores[i]
            assert score is not None
            margin = self.hysteresis * abs(score) if is_training(sites[i]) else 0.0
            return (-(score + margin), not is_training(sites[i]), i)

        order = sorted((i for i in range(len(sites)) if is_free[i]), key=rank_order)
        chosen = set(locked)
        for members in layers_of(observation).values():
            whole = sum(num_parameters(sites[i], observation.max_rank) for i in members)
            held = sum(size[i] for i in members if i in locked)
            for i in (i for i in order if i in members):
                if held >= self.floor * whole:
                    break
                if size[i] <= room and held + size[i] <= self.budget * whole:
                    chosen.add(i)
                    held += size[i]
                    room -= size[i]
        for i in order:
            if i not in chosen and size[i] <= room:
                chosen.add(i)
                room -= size[i]
        return chosen
