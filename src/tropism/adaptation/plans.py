"""Building plans, and the decisions that carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from tropism.adaptation.contracts import Decision, PlacementObservation, SiteObservation
from tropism.lora.plan import Plan, SitePlan


def present_plan(observation: PlacementObservation) -> Plan:
    """What is in force."""
    return tuple(site.plan for site in observation.sites)


def num_parameters(site: SiteObservation, rank: int) -> int:
    """Trainable parameters of ``rank`` components there: rank * (d_in + d_out)."""
    return rank * (site.d_in + site.d_out)


def total_parameters(observation: PlacementObservation) -> int:
    """Trainable parameters where every adapter trains at full rank."""
    return sum(
        num_parameters(site, observation.max_rank) for site in observation.sites if site.can_train
    )


def resolve_rank(rank: int | None, observation: PlacementObservation) -> int:
    """``rank``, or all of an adapter's components where it is None.

    Raises:
        ValueError: The adapters have fewer components.
    """
    if rank is None:
        return observation.max_rank
    if rank > observation.max_rank:
        raise ValueError(
            f"rank={rank}: the adapters have {observation.max_rank} components; give at most "
            "that, or a larger LoRA rank to the model."
        )
    return rank


def train(site: SiteObservation, rank: int, lr_scale: float = 1.0) -> SitePlan:
    """The site trained."""
    return replace(site.plan, state="TRAIN", rank=rank, lr_scale=lr_scale)


def retire(site: SiteObservation, observation: PlacementObservation) -> SitePlan:
    """The site untrained, its forward unchanged: KEEP once it has trained, OFF before.

    A site has trained if it is KEEP, or if it is TRAIN and any optimizer step was taken.
    """
    is_untouched = site.plan.state == "OFF" or (site.plan.state == "TRAIN" and not observation.step)
    return replace(site.plan, state="OFF" if is_untouched else "KEEP", rank=0, lr_scale=1.0)


def jaccard(first: Plan, second: Plan) -> float:
    """|both train| / |either trains|; 1 where none trains in either."""
    one, other = ({site.key for site in plan if site.state == "TRAIN"} for plan in (first, second))
    return len(one & other) / len(one | other) if one | other else 1.0


def layers_of(observation: PlacementObservation) -> dict[int | None, set[int]]:
    """Layer -> indices of its sites that can train."""
    layers: dict[int | None, set[int]] = {}
    for i, site in enumerate(observation.sites):
        if site.can_train:
            layers.setdefault(site.plan.layer, set()).add(i)
    return layers


def random_cycles(observation: PlacementObservation, rng: np.random.Generator) -> dict[str, str]:
    """Site key -> key of another site of the same module and shape, for all that can train.

    One random cycle per kind of linear (Sattolo's algorithm): no site has its own key, unless it
    is the only one of its kind.
    """
    kinds: dict[tuple[str, int, int], list[str]] = {}
    for site in observation.sites:
        if site.can_train:
            kinds.setdefault((site.plan.module, site.d_in, site.d_out), []).append(site.plan.key)
    source: dict[str, str] = {}
    for keys in kinds.values():
        drawn = list(keys)
        for last in range(len(drawn) - 1, 0, -1):
            other = int(rng.integers(last))
            drawn[last], drawn[other] = drawn[other], drawn[last]
        source.update(zip(keys, drawn, strict=True))
    return source


def is_training(site: SiteObservation) -> bool:
    """Whether the site trains now."""
    return site.plan.state == "TRAIN"


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """A plan as JSON."""
    return [asdict(site) for site in plan]


def answer(
    observation: PlacementObservation,
    plan: Sequence[SitePlan],
    *,
    reason: str,
    state: Mapping[str, Any],
    scores: Sequence[float | None] | None = None,
    **extra: Any,
) -> Decision:
    """Apply ``plan``; a plan that is in force already is held.

    Args:
        observation: What was decided on.
        plan: One entry per site.
        reason: One sentence, without a full stop.
        state: For the next decision.
        scores: One per site; None for a policy that scores nothing.
        extra: Further entries of the decision's value.
    """
    new, now = tuple(plan), present_plan(observation)
    if new == now:
        return hold(observation, f"{reason}; in force already", state=state, scores=scores, **extra)
    return Decision(
        action="apply",
        reason=reason,
        value={"plan": plan_rows(new), "jaccard": jaccard(new, now), **extra},
        scores=tuple(scores) if scores is not None else (None,) * len(now),
        state=state,
    )


def hold(
    observation: PlacementObservation,
    reason: str,
    *,
    state: Mapping[str, Any],
    scores: Sequence[float | None] | None = None,
    **extra: Any,
) -> Decision:
    """Keep what is in force; arguments as for ``answer``."""
    now = present_plan(observation)
    return Decision(
        action="hold",
        reason=reason,
        value={"plan": plan_rows(now), "jaccard": 1.0, **extra},
        scores=tuple(scores) if scores is not None else (None,) * len(now),
        state=state,
    )
