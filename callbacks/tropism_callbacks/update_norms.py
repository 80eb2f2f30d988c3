"""How far each linear has moved from the starting policy, and by this rollout's update alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from tropism.measurements import metrics as names
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.realised_update import StepMeter
from tropism.measurements.update_norms import (
    dense_change_norm,
    lora_change_norm,
    low_rank_norm,
    starting_norm,
)
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_heat_map, log_scalars

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning
    from tropism.policy import Policy

_HEAT_MAPS = {"update_norm": names.UPDATE_NORM_HEAT_MAP, "step_norm": names.STEP_NORM_HEAT_MAP}
LEAST_REALISED = 0.5
"""Less of the requested update than this reaching the weights is worth a warning."""


class UpdateNorms(Callback, StepObserver):
    """Measures ||W_t - W_0||_F / ||W_0||_F of every linear; W_0 belongs to the starting policy.

    LoRA is measured by QR of its factors, full-parameter training against a copy of W_0 in CPU
    memory (which checkpoints then carry: a resumed run measures from the same start).

    Logs:
        ``update_norms/cumulative`` and ``update_norms/step``: layer x module images;
        ``update_norms/realised``: how much of the update that AdamW asked for survived rounding to
        the weights' dtype (a warning, once, where it is less than half).
    Writes:
        ``records/update_norms.jsonl``, a row per linear; ``step_norm`` is 0 for a rollout that
        took no optimizer step.
    Changes:
        Nothing.

    Args:
        every_n_rollouts: Measure rollouts 0, n, 2n, ... and the last.
        heat_map_every: Draw at rollouts 0, m, 2m, ... where measured, and at the last; 0: never.
    """

    def __init__(self, every_n_rollouts: int = 1, heat_map_every: int = 10) -> None:
        if every_n_rollouts < 1:
            raise ValueError(
                f"UpdateNorms.every_n_rollouts={every_n_rollouts}: give 1 or more, or leave the "
                "callback out."
            )
        if heat_map_every < 0:
            raise ValueError(f"UpdateNorms.heat_map_every={heat_map_every}: give 0 or more.")
        self.every_n_rollouts = every_n_rollouts
        self.heat_map_every = heat_map_every
        self._start_weights: dict[str, Tensor] = {}  # full-parameter only
        self._start_norms: dict[str, float] = {}
        self._before: dict[str, tuple[Tensor, ...]] = {}  # empty: no optimizer step
        self._meter: StepMeter | None = None  # while an update is under way
        self._has_warned = False
        self.latest: dict[str, float | None] = {}
        """Key of a linear -> its last ``update_norm``."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            pl_module.add_observer(self)  # type: ignore[operator]
            self._recorder = Recorder(
                run_folder(trainer), "update_norms", enabled=trainer.is_global_zero
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        policy: Policy = pl_module.policy
        if not policy.uses_lora and not self._start_weights:
            if pl_module.rollout > 0:
                raise ValueError(
                    "UpdateNorms was not part of the run that this checkpoint comes from, and the "
                    "starting weights of a full-parameter run cannot be known from it: leave "
                    "UpdateNorms out, or start the run again."
                )
            self._start_weights = {
                site.name: _weight(policy, site).cpu().clone() for site in policy.sites
            }
        self._start_norms = {site.name: self._norm_of_start(policy, site) for site in policy.sites}
        self._recorder.rewind(pl_module.rollout)

    def before_update(self, module: FineTuning, batch: RolloutBatch) -> None:
        if not self._is_measured(module.trainer, batch.rollout):
            return
        for site in module.policy.sites:
            if not module.policy.uses_lora:
                self._before[site.name] = (_weight(module.policy, site).cpu().clone(),)
            elif (adapter := module.policy.adapter(site)) is not None:
                self._before[site.name] = (adapter.a.detach().clone(), adapter.b.detach().clone())
        (optimizer,) = module.trainer.optimizers
        if isinstance(optimizer, torch.optim.AdamW):
            self._meter = StepMeter(optimizer)

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        policy, trainer = module.policy, module.trainer
        if not self._is_measured(trainer, batch.rollout):
            return
        rows = [self._row(module, site) for site in policy.sites]
        self._before = {}
        self.latest = {
            site.key: row["update_norm"] for site, row in zip(policy.sites, rows, strict=True)
        }
        self._recorder.append(rows, rollout=batch.rollout, step=trainer.global_step)
        self._log_realised(module, batch.rollout, metrics["lr"])
        every = self.heat_map_every
        if every and (batch.rollout % every == 0 or _is_last(trainer, batch.rollout)):
            for column, name in _HEAT_MAPS.items():
                values = [row[column] for row in rows]
                title = f"{column}, rollout {batch.rollout}"
                log_heat_map(trainer, name, policy.sites, values, title=title, x=batch.rollout)

    def _log_realised(self, module: FineTuning, rollout: int, rate: float | None) -> None:
        if self._meter is None:
            return
        realised, self._meter = self._meter.detach(), None
        log_scalars(module.trainer, {names.REALISED_UPDATE: realised}, x=rollout)
        if realised is not None and realised < LEAST_REALISED and not self._has_warned:
            self._has_warned = True
            dtypes = {str(p.dtype) for p in module.policy.named_trainable().values()}
            rank_zero_warn(
                f"only {realised:.0%} of the update that AdamW asked for in rollout {rollout} "
                f"reached the weights: at a learning rate of {rate:g}, {', '.join(sorted(dtypes))} "
                "rounds the rest away. Set model.dtype to float32, set `lora` (adapters have fp32 "
                "masters), or raise optimizer.learning_rate."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"start_weights": self._start_weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start_weights = state_dict["start_weights"]

    def _is_measured(self, trainer: Trainer, rollout: int) -> bool:
        return rollout % self.every_n_rollouts == 0 or _is_last(trainer, rollout)

    @torch.no_grad()
    def _norm_of_start(self, policy: Policy, site: LinearSite) -> float:
        weight = self._start_weights[site.name] if self._start_weights else _weight(policy, site)
        start, adapter = policy.starting_adapter(site), policy.adapter(site)
        if start is None or adapter is None:
            return float(starting_norm(weight))
        return float(starting_norm(weight, *start, adapter.scaling))

    @torch.no_grad()
    def _row(self, module: FineTuning, site: LinearSite) -> dict[str, Any]:
        policy = module.policy
        before = self._before.get(site.name)
        total = step = 0.0
        if not policy.uses_lora:
            weight = _weight(policy, site)
            total = float(dense_change_norm(weight, self._start_weights[site.name]))
            step = float(dense_change_norm(weight, *before)) if before else 0.0
        elif (adapter := policy.adapter(site)) is not None:
            a, b, scaling = adapter.a, adapter.b, adapter.scaling
            start = policy.starting_adapter(site)
            if start is None:  # B_0 = 0
                total = abs(scaling) * float(low_rank_norm(b, a))
            else:
                a_start, b_start = (factor.to(a.device) for factor in start)
                total = float(lora_change_norm(a, b, a_start, b_start, scaling))
            if before:
                a_before, b_before = before
                step = float(lora_change_norm(a, b, a_before, b_before, scaling))
        norm = self._start_norms[site.name]
        return {
            "layer": site.layer,
            "module": site.module,
            **_in_force(module, site),
            "update_norm": total / norm if norm else None,
            "step_norm": step / norm if norm else None,
        }


def _in_force(module: FineTuning, site: LinearSite) -> dict[str, Any]:
    """State, rank and lr_scale by the plan; a weight that trains itself has its full rank."""
    if module.placement is None:
        rank = min(_weight(module.policy, site).shape)
        return {"state": "TRAIN", "rank": rank, "lr_scale": 1.0}
    entry = module.placement.entry(site)
    return {"state": entry.state, "rank": entry.rank, "lr_scale": entry.lr_scale}


def _weight(policy: Policy, site: LinearSite) -> Tensor:
    weight = policy.linear(site).weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _is_last(trainer: Trainer, rollout: int) -> bool:
    return rollout + 1 >= trainer.num_training_batches
