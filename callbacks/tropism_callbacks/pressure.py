"""Where the reward pulls, and how surely: probes are pooled, and read when there are enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from tropism.loop.moves import Moves
from tropism.loop.probing import Prober
from tropism.measurements import metrics as names
from tropism.measurements.gain import GainEstimate
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.pressure import PressureEstimate
from tropism.measurements.reward_gradients import RewardGradients, energy_shares
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_heat_map, log_scalars


@dataclass(frozen=True)
class Reading:
    """What the pool said when it was full.

    Args:
        rollout: During which rollout.
        pressure: Every linear.
        rewards: Every linear and reward component.
        gain: What the last updates gained; None where that is not measured.
    """

    rollout: int
    pressure: PressureEstimate
    rewards: RewardGradients
    gain: GainEstimate | None = None


class Pressure(Callback, StepObserver):
    """Probes a few completions of some rollouts; adaptive callbacks decide on its readings.

    A probe is a forward and a backward of its own, before the update, that touches no parameter.

    Logs:
        ``pressure/snr`` and ``pressure/debiased``: layer x module images; ``pressure/pooled_z``,
        ``pressure/noise_scale`` (beside ``rollouts/groups``), ``pressure/cost_share``,
        ``reward_gradients/share/*`` and ``reward_gradients/cosine/*``; where gains are measured
        ``gain/by_linear`` (image), ``gain/z`` and ``gain/shared_kl``.
    Writes:
        ``records/pressure.jsonl``, a row per linear and reading;
        ``records/reward_gradients.jsonl``, a row per linear and pair of components;
        ``records/gains.jsonl``, a row per linear and reading; ``records/moves.jsonl``, a row per
        completion that gains were measured on (``measurements/ceiling.py`` reads them).
    Changes:
        Nothing that trains.

    Args:
        every_n_rollouts: Probe rollouts 0, n, 2n, ...
        num_prompts: Prompts of a probe.
        num_completions: Completions of each.
        choice: ``contrast`` takes the best and the worst ones, ``uniform`` any.
        probes_per_reading: Probes in a full pool.
        max_rows: Most completions in the pool; the oldest prompts leave first.
        sketch_size: k of the [k, k] sketches; a norm deviates by about 2 / sqrt(k) at worst.
        should_score_statically: Also score the linears without any reward (PLoP, weight norm)
            once, at the first probe: controls for placement.
        should_align: Also measure at every reading how little each linear fits its surroundings
            (signal ``misalignment``): what finds damaged linears. Cubic in their width.
        should_measure_gain: Also measure what the last update before a probe gained at each linear,
            on this rollout's completions (signal ``gain``).
        should_draw: Draw the maps at every reading, for TensorBoard: half a second for the two.
    """

    def __init__(
        self,
        every_n_rollouts: int = 3,
        num_prompts: int = 2,
        num_completions: int = 2,
        choice: Literal["contrast", "uniform"] = "contrast",
        probes_per_reading: int = 8,
        max_rows: int = 96,
        sketch_size: int = 32,
        should_score_statically: bool = False,
        should_align: bool = False,
        should_measure_gain: bool = False,
        should_draw: bool = True,
    ) -> None:
        for name, value, least in (
            ("every_n_rollouts", every_n_rollouts, 1),
            ("num_prompts", num_prompts, 1),
            ("num_completions", num_completions, 2),
            ("probes_per_reading", probes_per_reading, 2),
        ):
            if value < least:
                raise ValueError(f"Pressure.{name}={value}: give at least {least}.")
        if max_rows < (needed := probes_per_reading * num_prompts * num_completions):
            raise ValueError(
                f"Pressure.max_rows={max_rows}: a full pool has probes_per_reading * num_prompts * "
                f"num_completions = {needed} completions; raise max_rows to that, or probe less."
            )
        self.every_n_rollouts = every_n_rollouts
        self.probes_per_reading = probes_per_reading
        self.should_score_statically = should_score_statically
        self.should_measure_gain = should_measure_gain
        self.should_draw = should_draw
        self.static_scores: dict[str, dict[str, float | None]] = {}
        self._settings: dict[str, Any] = {
            "num_prompts": num_prompts,
            "num_completions": num_completions,
            "choice": choice,
            "max_rows": max_rows,
            "sketch_size": sketch_size,
            "should_align": should_align,
        }
        self._moves = Moves() if should_measure_gain else None
        self._prober: Prober | None = None
        self._saved: Mapping[str, Any] = {}
        self._reading: Reading | None = None
        self._is_scored = False
        self._seconds = {"probe": 0.0, "all": 0.0}

    def reading_of(self, rollout: int) -> Reading | None:
        """The reading that fell due in this rollout, if any."""
        reading = self._reading
        return reading if reading is not None and reading.rollout == rollout else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not hasattr(pl_module, "objective"):
            raise ValueError(
                f"Pressure measures the pull of rewards, and {type(pl_module).__name__} has none: "
                "leave the callback out, or train with tropism.GRPO."
            )
        pl_module.add_observer(self)  # type: ignore[operator]
        folder, enabled = run_folder(trainer), trainer.is_global_zero
        self._table = Recorder(folder, "pressure", enabled=enabled)
        self._reward_table = Recorder(folder, "reward_gradients", enabled=enabled)
        self._gain_table = Recorder(folder, "gains", enabled=enabled)
        self._move_table = Recorder(folder, "moves", enabled=enabled)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._prober = Prober(
            pl_module.policy,
            pl_module.objective,
            pl_module.sampling,
            components=tuple(pl_module.rewards.weights),
            seed=pl_module.seed,
            **self._settings,
        )
        if self._saved.get("pool") is not None:
            self._prober.pool.load_state_dict(self._saved["pool"])
        if self._prober.moments is not None and self._saved.get("moments") is not None:
            self._prober.moments.load_state_dict(self._saved["moments"])
        if self._moves is not None and pl_module.placement is None:
            raise ValueError(
                "Pressure.should_measure_gain=true with lora=null: gains are measured on the moves "
                "of adapters; set `lora`, or leave it false."
            )
        if self._moves is not None and self._saved.get("gains") is not None:
            self._prober.gains.load_state_dict(self._saved["gains"])
            self._moves.load_state_dict(self._saved["moves"])
        for table in (self._table, self._reward_table, self._gain_table, self._move_table):
            table.rewind(pl_module.rollout)

    def rollout_scored(self, module: Any, batch: RolloutBatch) -> None:
        assert self._prober is not None
        if batch.rollout % self.every_n_rollouts == 0:
            self._probe(module, batch)
        if self._moves is not None and (batch.rollout + 1) % self.every_n_rollouts == 0:
            self._moves.keep(module.policy, module.placement.plan)

    def _probe(self, module: Any, batch: RolloutBatch) -> None:
        assert self._prober is not None
        if self.should_score_statically and not self._is_scored:
            self.static_scores, self._is_scored = self._prober.static_scores(batch), True
        moves = {} if self._moves is None else self._moves.since(module.policy)
        self._prober.probe(batch, module.rewards.weights, moves)
        if self._prober.pool.probes_pooled >= self.probes_per_reading:
            self._read(module, batch)
            self._prober.pool.new_pool()
            self._prober.gains.new_pool()

    def _read(self, module: Any, batch: RolloutBatch) -> None:
        assert self._prober is not None
        pool, sites = self._prober.pool, module.policy.sites
        if self._prober.moments is not None:
            for key, score in self._prober.misalignment().items():
                self.static_scores.setdefault(key, {})["misalignment"] = score
        pressure = pool.estimate(rank=1 if module.lora is None else module.lora.rank)
        rewards = pool.reward_gradients()
        gain = None if self._moves is None else self._prober.gains.estimate()
        self._reading = Reading(batch.rollout, pressure, rewards, gain)
        trained = rewards.over([module.trains_at(site) for site in sites])
        module.gradient_shares = energy_shares(trained, module.rewards.weights)
        place = {"rollout": batch.rollout, "step": module.trainer.global_step}
        self._table.append([site.record() for site in pressure.sites], **place)
        self._reward_table.append(reward_rows(rewards, sites), **place)
        scalars = {
            names.POOLED_Z: pressure.pooled_z,
            names.NOISE_SCALE: pressure.noise_scale,
            **{names.gradient_share(c): share for c, share in module.gradient_shares.items()},
            **{
                names.reward_cosine(one, other): trained.cosine(one, other)
                for i, one in enumerate(rewards.components)
                for other in rewards.components[i + 1 :]
            },
        }
        maps = {
            names.SNR_HEAT_MAP: [site.snr for site in pressure.sites],
            names.DEBIASED_HEAT_MAP: [site.debiased_sq for site in pressure.sites],
        }
        if gain is not None:
            self._gain_table.append([site.record() for site in gain.sites], **place)
            self._move_table.append(self._prober.gains.records(), **place)
            scalars |= {names.GAIN_Z: gain.z, names.GAIN_SHARED_KL: gain.shared_kl}
            maps[names.GAIN_HEAT_MAP] = [site.gain for site in gain.sites]
        log_scalars(module.trainer, scalars, x=batch.rollout)
        if not self.should_draw:
            return
        title = f"rollout {batch.rollout}, {pressure.probes_pooled} probes"
        for name, values in maps.items():
            log_heat_map(module.trainer, name, sites, values, title=title, x=batch.rollout)

    def after_update(
        self, module: Any, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        self._seconds["probe"] += batch.seconds.get("probe", 0.0)
        self._seconds["all"] += sum(batch.seconds.values())
        share = self._seconds["probe"] / self._seconds["all"]
        scalars = {names.PROBE_COST: share, names.GROUPS: float(len(batch.rollouts))}
        log_scalars(module.trainer, scalars, x=batch.rollout)

    def summary(self) -> dict[str, Any]:
        """The share of time that probes took, for ``run.json``."""
        total = self._seconds["all"]
        return {"pressure": {"cost_share": self._seconds["probe"] / total if total else None}}

    def state_dict(self) -> dict[str, Any]:
        pool = None if self._prober is None else self._prober.pool
        moments = None if self._prober is None else self._prober.moments
        return {
            "pool": None if pool is None else pool.state_dict(),
            "moments": None if moments is None else moments.state_dict(),
            "gains": None if self._prober is None else self._prober.gains.state_dict(),
            "moves": None if self._moves is None else self._moves.state_dict(),
            "static_scores": self.static_scores,
            "seconds": self._seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = {key: state_dict.get(key) for key in ("pool", "moments", "gains", "moves")}
        self.static_scores = state_dict["static_scores"]
        self._is_scored = any("plop" in scores for scores in self.static_scores.values())
        self._seconds = state_dict["seconds"]


def reward_rows(rewards: RewardGradients, sites: Sequence[LinearSite]) -> list[dict[str, Any]]:
    """Rows of the ``reward_gradients`` table: each unordered pair of components once."""
    return [
        {
            "layer": site.layer,
            "module": site.module,
            "component": component,
            "other": other,
            "norm_sq": rewards.norm_sq(component, index) if component == other else None,
            "cosine": rewards.cosine(component, other, index),
        }
        for index, site in enumerate(sites)
        for i, component in enumerate(rewards.components)
        for other in rewards.components[i:]
    ]
