"""What the adaptive callbacks share: asking a policy, recording the answer, finding readings."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from tropism.adaptation.contracts import Decision
from tropism.adaptation.decide import (
    decision_to_json,
    make,
    observation_to_json,
    policy_to_json,
    random_key,
)
from tropism_callbacks.pressure import Pressure
from tropism_callbacks.run_folder import Recorder, run_folder


class Decider:
    """A policy and its state; every question is recorded with its answer.

    Args:
        kind: ``placement``, ``rewards`` or ``rollouts``.
        policy: Decides.
    """

    def __init__(self, kind: str, policy: Any) -> None:
        self.kind, self.policy = kind, policy
        self.state: dict[str, Any] = {}
        self._recorder: Recorder | None = None
        self._said = ""

    def open(self, trainer: Trainer) -> None:
        """Find the run's table."""
        self._recorder = Recorder(run_folder(trainer), "decisions", enabled=trainer.is_global_zero)

    def rewind(self, rollout: int) -> None:
        """Drop this kind's rows from ``rollout`` on: a resumed run writes them again."""
        assert self._recorder is not None
        self._recorder.rewind(rollout)

    def decide(self, observation: Any, *, seed: int) -> Decision:
        """Ask the policy, record question and answer, and keep the policy's state.

        An answer is logged, but not that the plan is held for the same reason as last time.
        """
        key = random_key(seed, self.kind, observation.rollout)
        before = self.state
        decision = make(self.policy, observation, before, key)
        self.state = dict(decision.state)
        status = "applied" if decision.action == "apply" else "held"
        self._record(observation, before, key, decision, status)
        said = f"{self.kind} {status}: {decision.reason}"
        if said != self._said or decision.action == "apply":
            rank_zero_info(f"rollout {observation.rollout}: {said}")
        self._said = said
        return decision

    def roll_back(self, observation: Any, decision: Decision) -> None:
        """Record that what was applied has been taken back (``decision.reason`` says why)."""
        self._record(observation, self.state, (), decision, "rolled back")

    def _record(
        self,
        observation: Any,
        before: dict[str, Any],
        key: tuple[int, ...],
        decision: Decision,
        status: str,
    ) -> None:
        assert self._recorder is not None
        row = {
            "kind": self.kind,
            "policy": policy_to_json(self.policy),
            "observation": observation_to_json(observation),
            "state_before": before,
            "rng": list(key),
            "decision": decision_to_json(decision),
            "status": status,
        }
        self._recorder.append([row], rollout=observation.rollout, step=observation.step)


def find_pressure(trainer: Trainer, needed_by: str) -> Pressure:
    """The run's Pressure callback.

    Raises:
        ValueError: There is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Pressure):
            return callback
    raise ValueError(
        f"{needed_by} decides on measurements: add tropism_callbacks.Pressure to trainer.callbacks."
    )
