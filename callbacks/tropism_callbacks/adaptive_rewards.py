"""Moves the weights of the reward components while training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tropism.adaptation.contracts import RewardObservation, RewardPolicy
from tropism.adaptation.rewards import GDPO
from tropism.loop.observing import observe_rewards
from tropism.measurements import metrics as names
from tropism.measurements.component_statistics import component_statistics
from tropism.scoring import component_names
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.decisions import Decider, find_pressure
from tropism_callbacks.pressure import Reading
from tropism_callbacks.tensorboard import log_scalars


class AdaptiveRewards(Callback, StepObserver):
    """Asks a policy at every reading of ``Pressure``; its weights hold from the next rollout on.

    What evaluation reports is each task's primary component, which no weight touches.

    Logs:
        ``reward_weights/<component>``.
    Writes:
        ``records/decisions.jsonl``, a row per question to the policy.
    Changes:
        The weights of the reward components.

    Args:
        policy: Decides.
        outcome: Component that says whether a task was solved, whose share is to be kept; the
            primary one of the only task where null.
    """

    def __init__(self, policy: RewardPolicy, outcome: str | None = None) -> None:
        self.decider = Decider("rewards", policy)
        self.outcome = outcome
        self._initial: dict[str, float] = {}
        self._seen: dict[str, list[Mapping[str, float | None]]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._pressure = find_pressure(trainer, "AdaptiveRewards")
        pl_module.add_observer(self)  # type: ignore[operator]
        self.decider.open(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if isinstance(self.decider.policy, GDPO):
            self.decider.policy.check_objective(pl_module.objective.aggregation)
        known = component_names(pl_module.tasks)
        if self.outcome is None:
            if len(pl_module.tasks) > 1:
                raise ValueError(
                    f"AdaptiveRewards.outcome=null with the tasks {sorted(pl_module.tasks)}: name "
                    f"one of the components {sorted(known.values())}."
                )
            ((name, task),) = pl_module.tasks.items()
            self.outcome = known[name, task.primary]
        if self.outcome not in known.values():
            raise ValueError(
                f"AdaptiveRewards.outcome={self.outcome!r} is no component; choose from "
                f"{sorted(known.values())}."
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.decider.rewind(pl_module.rollout)
        if not self._initial:
            self._initial = dict(pl_module.rewards.weights)
        self._log(pl_module, pl_module.rollout)

    def after_update(
        self, module: Any, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        for name, scores in batch.components.items():
            statistics = component_statistics(scores, batch.group_size)
            self._seen.setdefault(name, []).append(statistics)
        reading = self._pressure.reading_of(batch.rollout)
        if reading is not None:
            self._ask(module, batch, reading)

    def _ask(self, module: Any, batch: RolloutBatch, reading: Reading) -> None:
        observation = self._observe(module, batch, reading)
        self._seen = {}
        decision = self.decider.decide(observation, seed=module.seed)
        if decision.action == "apply":
            for name, weight in decision.value["weights"].items():
                module.rewards.set_weight(name, weight)
        self._log(module, batch.rollout)

    def _observe(self, module: Any, batch: RolloutBatch, reading: Reading) -> RewardObservation:
        assert self.outcome is not None
        sites = module.policy.sites
        return observe_rewards(
            rollout=batch.rollout,
            step=module.trainer.global_step,
            probes_pooled=reading.pressure.probes_pooled,
            outcome=self.outcome,
            weights=module.rewards.weights,
            initial_weights=self._initial,
            statistics={name: mean_statistics(seen) for name, seen in self._seen.items()},
            gradients=reading.rewards.over([module.trains_at(site) for site in sites]),
        )

    def _log(self, module: Any, rollout: int) -> None:
        weights = module.rewards.weights
        scalars = {names.reward_weight(name): weight for name, weight in weights.items()}
        log_scalars(module.trainer, scalars, x=rollout)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.decider.state, "initial": self._initial, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.decider.state = state_dict["policy"]
        self._initial, self._seen = state_dict["initial"], state_dict["seen"]


def mean_statistics(seen: list[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean over rollouts of each statistic, leaving out where it was undefined."""
    result: dict[str, float | None] = {}
    for name in ("mean", "group_std"):
        values = [value for statistics in seen if (value := statistics[name]) is not None]
        result[name] = sum(values) / len(values) if values else None
    return result
