"""From measurements to what policies see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tropism.adaptation.contracts import (
    ComponentObservation,
    PlacementObservation,
    RewardObservation,
    SiteObservation,
)
from tropism.lora.plan import Plan
from tropism.measurements.gain import GainEstimate
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.pressure import PressureEstimate
from tropism.measurements.reward_gradients import RewardGradients


def observe_placement(
    *,
    rollout: int,
    step: int,
    max_rank: int,
    plan: Plan,
    sites: Sequence[LinearSite],
    shapes: Sequence[tuple[int, int]],
    can_train: Sequence[bool],
    pressure: PressureEstimate | None,
    other_signals: Mapping[str, Mapping[str, float | None]],
    num_rollbacks: int = 0,
    gain: GainEstimate | None = None,
) -> PlacementObservation:
    """What a placement policy decides on.

    Args:
        rollout: Rollouts done.
        step: Optimizer steps done.
        max_rank: R.
        plan: In force.
        sites: Every linear.
        shapes: (d_out, d_in) of each.
        can_train: Whether each carries an adapter.
        pressure: Without any, the measured signals are undefined.
        other_signals: Key of a linear -> further signals (``update_norm``, ``plop``, ...).
        num_rollbacks: Times that the guard took a switch back.
        gain: Of the last updates, where it is measured.
    """
    observed = []
    for i, (site, (d_out, d_in)) in enumerate(zip(sites, shapes, strict=True)):
        measured = None if pressure is None else pressure.sites[i]
        signals = {} if measured is None else measured.signals()
        if gain is not None:
            signals["gain"] = gain.sites[i].gain
        observed.append(
            SiteObservation(
                plan=plan[i],
                d_in=d_in,
                d_out=d_out,
                can_train=can_train[i],
                signals={**signals, **other_signals.get(site.key, {})},
                null_z=None if measured is None else measured.null_z,
            )
        )
    return PlacementObservation(
        rollout=rollout,
        step=step,
        max_rank=max_rank,
        probes_pooled=0 if pressure is None else pressure.probes_pooled,
        pooled_z=None if pressure is None else pressure.pooled_z,
        sites=tuple(observed),
        num_rollbacks=num_rollbacks,
        gain_z=None if gain is None else gain.z,
    )


def observe_rewards(
    *,
    rollout: int,
    step: int,
    probes_pooled: int,
    outcome: str,
    weights: Mapping[str, float],
    initial_weights: Mapping[str, float],
    statistics: Mapping[str, Mapping[str, float | None]],
    gradients: RewardGradients,
) -> RewardObservation:
    """What a reward policy decides on.

    Args:
        rollout: Rollouts done.
        step: Optimizer steps done.
        probes_pooled: Probes behind ``gradients``.
        outcome: Component that says whether the task was solved.
        weights: In force.
        initial_weights: At the start of the run.
        statistics: Component -> ``mean`` and ``group_std`` since the last decision.
        gradients: Over the linears that train, as one site.
    """
    return RewardObservation(
        rollout=rollout,
        step=step,
        probes_pooled=probes_pooled,
        outcome=outcome,
        components=tuple(
            ComponentObservation(
                name=name,
                weight=weights[name],
                initial_weight=initial_weights[name],
                mean=statistics[name]["mean"],
                group_std=statistics[name]["group_std"],
                gradient_norm_sq=gradients.norm_sq(name),
                cosines={
                    other: gradients.cosine(name, other)
                    for other in gradients.components
                    if other != name
                },
            )
            for name in gradients.components
        ),
    )
