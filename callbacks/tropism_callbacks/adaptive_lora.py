"""Moves LoRA while training runs: measurements -> policy -> plan, watched by a guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from tropism.adaptation.contracts import Decision, PlacementObservation, PlacementPolicy
from tropism.adaptation.decide import (
    decision_from_json,
    decision_to_json,
    observation_from_json,
    observation_to_json,
)
from tropism.adaptation.guard import Guard
from tropism.adaptation.plan_timeline import draw_plan_timeline
from tropism.loop.observing import observe_placement
from tropism.loop.snapshot import Snapshot
from tropism.loop.switching import SwitchWatch, require_same_outputs
from tropism.lora.plan import Plan, plan_from_rows
from tropism.measurements import metrics as names
from tropism.measurements.gradient_probe import linear_shape
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.decisions import Decider, find_pressure
from tropism_callbacks.pressure import Pressure
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_figure, log_heat_map, log_scalars
from tropism_callbacks.update_norms import UpdateNorms


class AdaptiveLoRA(Callback, StepObserver):
    """Asks a policy at every reading of ``Pressure`` and carries out its plan between rollouts.

    At a switch the logits and the reference stay what they are, which is asserted on completions
    of the rollout. For some rollouts after it a guard watches KL, entropy and gradient norm, and
    takes the switch back where they spike.

    Logs:
        ``plan/timeline`` and ``plan/lr_scale`` (images), ``plan/jaccard``,
        ``plan/trained_linears``, ``plan/guard_kl``.
    Writes:
        ``records/plans.jsonl``, a row per linear at rollout 0 and after each applied decision;
        ``records/decisions.jsonl``, a row per question to the policy.
    Changes:
        Which adapters train, their ranks and learning rates.

    Args:
        policy: Decides.
        guard: Watches what follows a switch; null for none.
        warmup_steps: Optimizer steps until a module that enters moves at full speed.
        every_n_rollouts: Ask every n rollouts instead, for policies that need no measurements.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        guard: Guard | None = Guard(),
        warmup_steps: int = 20,
        every_n_rollouts: int | None = None,
    ) -> None:
        for name, value, least in (
            ("warmup_steps", warmup_steps, 0),
            ("every_n_rollouts", every_n_rollouts, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"AdaptiveLoRA.{name}={value}: give at least {least}.")
        self.decider = Decider("placement", policy)
        self.guard = guard
        self.warmup_steps = warmup_steps
        self.every_n_rollouts = every_n_rollouts
        self._pressure: Pressure | None = None
        self._history: list[tuple[int, Plan]] = []
        self._watch = SwitchWatch()
        self._last: tuple[PlacementObservation, Decision] | None = None
        self._num_rollbacks = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if pl_module.lora is None:
            raise ValueError("AdaptiveLoRA with lora=null: there is no LoRA to move; set `lora`.")
        if self.every_n_rollouts is None:
            self._pressure = find_pressure(trainer, "AdaptiveLoRA")
        pl_module.add_observer(self)  # type: ignore[operator]
        self.decider.open(trainer)
        self._plans = Recorder(run_folder(trainer), "plans", enabled=trainer.is_global_zero)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.decider.rewind(pl_module.rollout)
        self._plans.rewind(pl_module.rollout)
        pl_module.placement.warmup_steps = self.warmup_steps
        if not self._history:
            self._enter(pl_module, None)
            self._ask(pl_module, None)

    # -- a rollout ----------------------------------------------------------------------------

    def before_update(self, module: Any, batch: RolloutBatch) -> None:
        if self._watch.is_on:
            self._watch.before_update(module.policy, batch)

    def after_update(
        self, module: Any, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        temperature = module.sampling.temperature
        kl = self._watch.after_update(module.policy, metrics, temperature=temperature)
        if self._watch.is_on:
            log_scalars(module.trainer, {names.GUARD_KL: kl}, x=batch.rollout)
            self._check_switch(module, batch)
        every = self.every_n_rollouts
        if every is not None:
            if (batch.rollout + 1) % every == 0:
                self._ask(module, batch)
        elif self._pressure is not None and self._pressure.reading_of(batch.rollout) is not None:
            self._ask(module, batch)

    def _ask(self, module: Any, batch: RolloutBatch | None) -> None:
        observation = self._observe(module, batch)
        decision = self.decider.decide(observation, seed=module.seed)
        if decision.action == "apply":
            self._apply(module, batch, decision)
            self._last = (observation, decision)

    def _observe(self, module: Any, batch: RolloutBatch | None) -> PlacementObservation:
        policy = module.policy
        reading = None
        if self._pressure is not None and batch is not None:
            reading = self._pressure.reading_of(batch.rollout)
        return observe_placement(
            rollout=module.rollout,
            step=module.trainer.global_step,
            max_rank=module.lora.rank,
            plan=module.placement.plan,
            sites=policy.sites,
            shapes=[linear_shape(policy.linear(site)) for site in policy.sites],
            can_train=[policy.lora_layer(site) is not None for site in policy.sites],
            pressure=None if reading is None else reading.pressure,
            other_signals=self._other_signals(module),
            num_rollbacks=self._num_rollbacks,
            gain=None if reading is None else reading.gain,
        )

    def _other_signals(self, module: Any) -> dict[str, dict[str, float | None]]:
        signals: dict[str, dict[str, float | None]] = {}
        for callback in module.trainer.callbacks:
            if isinstance(callback, UpdateNorms):
                for key, norm in callback.latest.items():
                    signals.setdefault(key, {})["update_norm"] = norm
            if isinstance(callback, Pressure):
                for key, scores in callback.static_scores.items():
                    signals.setdefault(key, {}).update(scores)
        return signals

    def _apply(self, module: Any, batch: RolloutBatch | None, decision: Decision) -> None:
        placement = module.placement
        plan = placement.feasible(plan_from_rows(decision.value["plan"]))
        if self.guard is not None and batch is not None:
            self._watch.start(Snapshot.take(module))
        reset = decision.value.get("reset", ())
        if decision.value.get("truncate", False):
            self._truncate(module, plan)
        else:
            with require_same_outputs(module.policy, batch):
                placement.apply(plan, module.raw_optimizer(), reset=reset)
        self._enter(module, decision)

    def _truncate(self, module: Any, plan: Plan) -> None:
        """The control that cuts ranks off: the logits jump, and the log says by how much."""
        module.placement.apply(plan, module.raw_optimizer())
        jumps = [
            module.placement.truncate(site)
            for site in module.policy.sites
            if module.placement.entry(site).state == "TRAIN"
        ]
        rank_zero_info(
            f"ranks cut off: the largest relative change of a weight is {max(jumps):.2g}"
        )

    def _check_switch(self, module: Any, batch: RolloutBatch) -> None:
        assert self.guard is not None
        reason = self.guard.check(self._watch.history_before, self._watch.since_switch)
        if reason is not None:
            assert self._last is not None
            observation, decision = self._last
            self._watch.roll_back(module)
            self._num_rollbacks += 1
            step = module.trainer.global_step
            now = replace(observation, rollout=batch.rollout, step=step)
            self.decider.roll_back(now, replace(decision, reason=reason))
            rank_zero_info(f"rollout {batch.rollout}: placement rolled back: {reason}")
            self._enter(module, decision)
        elif len(self._watch.since_switch) >= self.guard.rollouts:
            self._watch.stop()

    def _enter(self, module: Any, decision: Decision | None) -> None:
        """Record the plan that is in force from now on."""
        plan: Plan = module.placement.plan
        rollout = module.rollout
        name = type(self.decider.policy).__name__
        scores = (None,) * len(plan) if decision is None else decision.scores
        rows = [
            {"policy": name, **asdict(entry), "score": score}
            for entry, score in zip(plan, scores, strict=True)
        ]
        self._plans.append(rows, rollout=rollout, step=module.trainer.global_step)
        self._history.append((rollout, plan))
        trained = sum(entry.state == "TRAIN" for entry in plan)
        scalars: dict[str, float | None] = {names.PLAN_TRAINED: float(trained)}
        if decision is not None:
            scalars[names.PLAN_JACCARD] = decision.value.get("jaccard")
        log_scalars(module.trainer, scalars, x=rollout)
        sites = module.policy.sites
        scale = [entry.lr_scale if entry.state == "TRAIN" else None for entry in plan]
        title = f"lr_scale from rollout {rollout}"
        log_heat_map(module.trainer, names.LR_SCALE_HEAT_MAP, sites, scale, title=title, x=rollout)
        figure = draw_plan_timeline(self._history, end=rollout + 1)
        log_figure(module.trainer, names.PLAN_TIMELINE, figure, x=rollout)

    # -- checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.decider.state,
            "history": [(rollout, [asdict(e) for e in plan]) for rollout, plan in self._history],
            "watch": self._watch.state_dict(),
            "last": None if self._last is None else _to_json(*self._last),
            "num_rollbacks": self._num_rollbacks,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.decider.state = state_dict["policy"]
        self._history = [(rollout, plan_from_rows(p)) for rollout, p in state_dict["history"]]
        self._watch.load_state_dict(state_dict["watch"])
        last = state_dict.get("last")  # runs of earlier versions saved neither
        self._last = None if last is None else _from_json(last)
        self._num_rollbacks = state_dict.get("num_rollbacks", 0)


def _to_json(observation: PlacementObservation, decision: Decision) -> dict[str, Any]:
    return {
        "observation": observation_to_json(observation),
        "decision": decision_to_json(decision),
    }


def _from_json(content: Mapping[str, Any]) -> tuple[PlacementObservation, Decision]:
    observation = observation_from_json("placement", content["observation"])
    return observation, decision_from_json(content["decision"])
