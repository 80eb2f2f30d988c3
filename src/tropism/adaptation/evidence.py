"""Whether a map of signals says anything yet: the gate in front of every policy that acts on one.

``pooled_z`` of an observation is the z of the debiased energies summed over all linears, against
the same permutations at each. Sites of one run share prompts and completions, so combining their
own z-scores as if they were independent (Stouffer's method over sites) would count the same
evidence many times; this z does not.

A z is not a p-value here. The statistic is a quadratic form, and its null leans to the right: with
16 prompt groups and gradients of an effective dimension near 10, simulated maps without any signal
pass z = 2, 3, 4, 5 in 5.5, 2.2, 0.8 and 0.3 % of decisions, not in 2.3, 0.1 and less. And a run
decides often. So the default asks for 4, of the z combined over decisions with the weights of the
average that is acted on (two decisions must not share probes): without any signal one of 27 runs
of 8 decisions, or one of 11 runs of 20, still applies one; with an expected z of 2 in each decision
70 % of runs of 8 decisions do, with 2.5 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tropism.adaptation.contracts import PlacementObservation, PolicyState, SiteObservation
from tropism.adaptation.settings import require
from tropism.adaptation.smoothing import all_updated, mean_of, updated, z_of

_NAMES = {"pooled_z": "pooled z", "gain_z": "z of the gain"}


@dataclass(frozen=True)
class Evidence:
    """What the probes so far say.

    Args:
        objection: Why the plan must be held; None where it may change.
        text: The numbers, for a reason.
        means: Signal -> average over decisions, one per site, None where undefined.
        site_z: z of each site combined over decisions, None where undefined (or not asked for).
        numbers: ``pooled_z`` (this decision's) and ``evidence_z`` (combined over decisions), for
            the decision's value.
        state: For the policy's state: ``averages``, and after a rollback ``cooldown``: the
            rollbacks known of and the decisions still to wait.
    """

    objection: str | None
    text: str
    means: Mapping[str, tuple[float | None, ...]]
    site_z: tuple[float | None, ...]
    numbers: dict[str, float | None]
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Settings of all policies that act on measured signals.

    Args:
        min_probes: Fewer probes than this decide nothing.
        min_z: The combined z below which the plan is held (see ``tropism.adaptation.evidence``);
            None acts on any map, which is for controls and tests.
        smoothing: Weight of earlier decisions in the averages, in [0, 1); 0 uses the last map
            and its z alone.
        cooldown: Decisions on enough probes that hold the plan after the guard took a switch back,
            however strong the evidence, so that the same plan is not proposed again at once; 0 for
            none.
    """

    min_probes: int = 8
    min_z: float | None = 4.0
    smoothing: float = 0.5
    cooldown: int = 2

    def __post_init__(self) -> None:
        require(self.min_probes >= 0, self, "min_probes", "give 0 or more")
        is_finite = self.min_z is None or 0 <= self.min_z < math.inf
        require(is_finite, self, "min_z", "give 0 or more, or null")
        require(0 <= self.smoothing < 1, self, "smoothing", "give a value in [0, 1)")
        require(self.cooldown >= 0, self, "cooldown", "give 0 or more")

    def gather(
        self,
        observation: PlacementObservation,
        state: PolicyState,
        *signals: str,
        z: Literal["pooled_z", "gain_z"] = "pooled_z",
    ) -> Evidence:
        """Average the signals over decisions and judge whether they may be acted on.

        Args:
            observation: What is decided on.
            state: The policy's, with what earlier decisions left there.
            signals: Names of signals; ``null_z`` for the z of each site.
            z: Which z of all linears together is the evidence.
        """
        decisive: float | None = getattr(observation, z)
        before: Mapping[str, Any] = state.get("averages", {})
        num_waiting = self._num_waiting(observation, state)
        num_probes = observation.probes_pooled
        has_probes = num_probes >= self.min_probes
        averages = dict(before)
        cooldown = {}
        if observation.num_rollbacks:
            left = max(0, num_waiting - has_probes)
            cooldown["cooldown"] = [observation.num_rollbacks, left]
        if has_probes:
            averages[z] = updated(before.get(z), decisive, self.smoothing)
            for signal in signals:
                values = _values(observation, signal)
                averages[signal] = all_updated(before.get(signal, {}), values, self.smoothing)
        evidence_z = z_of(averages.get(z))
        text = _text(observation, _NAMES[z], decisive, evidence_z)
        objection = None
        if not has_probes:
            objection = f"{num_probes} probes pooled, {self.min_probes} are needed"
        elif undefined := [s for s in signals if not _is_defined(observation, s)]:
            objection = f"no linear has a defined {undefined[0]} ({text})"
        elif num_waiting:
            objection = (
                f"{text}; held, the guard took a switch back: decision "
                f"{self.cooldown - num_waiting + 1} of {self.cooldown}"
            )
        elif self.min_z is not None and (decisive is None or evidence_z is None):
            objection = text
        elif self.min_z is not None and evidence_z is not None and evidence_z < self.min_z:
            objection = f"{text}, below {self.min_z:g}"
        return Evidence(
            objection=objection,
            text=text,
            means={
                signal: _by_site(observation, averages.get(signal, {}), mean_of)
                for signal in signals
            },
            site_z=_by_site(observation, averages.get("null_z", {}), z_of),
            numbers={z: decisive, "evidence_z": evidence_z},
            state={"averages": averages, **cooldown},
        )

    def _num_waiting(self, observation: PlacementObservation, state: PolicyState) -> int:
        """Decisions that must hold, this one included."""
        # What was taken back before the first decision was another policy's.
        known_before = 0 if state else observation.num_rollbacks
        known, waiting = state.get("cooldown", (known_before, 0))
        return self.cooldown if observation.num_rollbacks > known else int(waiting)


def _values(observation: PlacementObservation, signal: str) -> dict[str, float | None]:
    return {site.plan.key: _value(site, signal) for site in observation.sites if site.can_train}


def _value(site: SiteObservation, signal: str) -> float | None:
    return site.null_z if signal == "null_z" else site.signals.get(signal)


def _is_defined(observation: PlacementObservation, signal: str) -> bool:
    return any(value is not None for value in _values(observation, signal).values())


def _by_site(
    observation: PlacementObservation, averages: Mapping[str, Any], of: Any
) -> tuple[float | None, ...]:
    return tuple(
        of(averages.get(site.plan.key)) if site.can_train else None for site in observation.sites
    )


def _text(
    observation: PlacementObservation, name: str, z: float | None, evidence_z: float | None
) -> str:
    over = f"over {observation.probes_pooled} probes"
    if z is None:
        return f"{name} undefined {over}"
    text = f"{name} {z:.1f} {over}"
    if evidence_z is not None and evidence_z != z:
        text += f" ({evidence_z:.1f} with earlier decisions)"
    return text
