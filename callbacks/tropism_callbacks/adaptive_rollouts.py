"""Moves how many prompts a rollout has, and how many completions each, while training runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tropism.adaptation.contracts import RolloutObservation, RolloutPolicy
from tropism.measurements import metrics as names
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.decisions import Decider, find_pressure
from tropism_callbacks.tensorboard import log_scalars


class AdaptiveRollouts(Callback, StepObserver):
    """Asks a policy at every reading of ``Pressure``; its sizes hold from the next rollout on.

    The config's prompts per rollout are the most there can be: of each batch that the data module
    hands out, the first ``num_groups`` prompts are used.

    Logs:
        ``rollouts/groups`` and ``rollouts/group_size``.
    Writes:
        ``records/decisions.jsonl``, a row per question to the policy.
    Changes:
        Groups per rollout and group size.

    Args:
        policy: Decides.
    """

    def __init__(self, policy: RolloutPolicy) -> None:
        self.decider = Decider("rollouts", policy)
        self._shares: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._pressure = find_pressure(trainer, "AdaptiveRollouts")
        pl_module.add_observer(self)  # type: ignore[operator]
        self.decider.open(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        there_are: int = trainer.datamodule.prompts_per_rollout  # type: ignore[attr-defined]
        wanted = getattr(self.decider.policy, "max_groups", 0)
        if wanted > there_are:
            raise ValueError(
                f"{type(self.decider.policy).__name__}.max_groups={wanted}, but a rollout has "
                f"{there_are} prompts (batch_size / group_size): lower max_groups, or begin with "
                "more and smaller groups."
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.decider.rewind(pl_module.rollout)

    def after_update(
        self, module: Any, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        self._shares.append(float(batch.zero_variance.float().mean()))
        sizes = {names.GROUPS: len(batch.rollouts), names.GROUP_SIZE: batch.group_size}
        log_scalars(module.trainer, sizes, x=batch.rollout)
        reading = self._pressure.reading_of(batch.rollout)
        if reading is None:
            return
        observation = RolloutObservation(
            rollout=batch.rollout,
            step=module.trainer.global_step,
            probes_pooled=reading.pressure.probes_pooled,
            num_groups=len(batch.rollouts),
            group_size=batch.group_size,
            noise_scale=reading.pressure.noise_scale,
            frac_zero_variance=sum(self._shares) / len(self._shares),
        )
        self._shares = []
        decision = self.decider.decide(observation, seed=module.seed)
        if decision.action == "apply":
            module.resize_rollouts(**decision.value)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self.decider.state, "shares": self._shares}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.decider.state, self._shares = state_dict["policy"], state_dict["shares"]
