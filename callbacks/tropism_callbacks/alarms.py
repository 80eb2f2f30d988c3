"""Says when a run goes wrong: the alarms of tropism.measurements.alarms, rollout by rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from tropism.measurements import metrics as names
from tropism.measurements.alarms import (
    NUM_START,
    Alarm,
    AllGroupsZeroVariance,
    EntropyCollapse,
    ExplodingGradientNorm,
    Finding,
    FormatPaidWhileAccuracyFalls,
    LengthToTheLimit,
    Reading,
    TagSpam,
    take_reading,
)
from tropism.types import RolloutBatch, StepObserver
from tropism_callbacks.run_folder import Recorder, run_folder
from tropism_callbacks.tensorboard import log_scalars

if TYPE_CHECKING:
    from tropism.finetuning import FineTuning


class Alarms(Callback, StepObserver):
    """Watches for what goes wrong in a run; null in place of an alarm leaves it out.

    Logs:
        ``alarms/<name>``: 1 while the alarm rings, else 0; a warning when one first begins to.
    Writes:
        ``records/alarms.jsonl``, a row when an alarm begins and when it ends; none: all was well.
    Changes:
        Nothing.

    Args:
        tag_spam: Completions repeat a tag.
        length_to_the_limit: Completions run into the token limit.
        exploding_gradient_norm: The gradient norm is many times what it was.
        entropy_collapse: The policy is all but certain of each token.
        format_paid_while_accuracy_falls: Form pays for answers that become worse.
        all_groups_zero_variance: There is nothing to learn from.
    """

    def __init__(
        self,
        tag_spam: TagSpam | None = TagSpam(),
        length_to_the_limit: LengthToTheLimit | None = LengthToTheLimit(),
        exploding_gradient_norm: ExplodingGradientNorm | None = ExplodingGradientNorm(),
        entropy_collapse: EntropyCollapse | None = EntropyCollapse(),
        format_paid_while_accuracy_falls: FormatPaidWhileAccuracyFalls
        | None = FormatPaidWhileAccuracyFalls(),
        all_groups_zero_variance: AllGroupsZeroVariance | None = AllGroupsZeroVariance(),
    ) -> None:
        every: tuple[Alarm | None, ...] = (
            tag_spam,
            length_to_the_limit,
            exploding_gradient_norm,
            entropy_collapse,
            format_paid_while_accuracy_falls,
            all_groups_zero_variance,
        )
        self.alarms = tuple(alarm for alarm in every if alarm is not None)
        self._format = format_paid_while_accuracy_falls
        self._start: list[Reading] = []
        self._recent: list[Reading] = []
        self._has_warned: set[str] = set()
        self.findings: dict[str, Finding] = {}
        """Name of an alarm -> what it said after the last rollout."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            pl_module.add_observer(self)  # type: ignore[operator]
            self._recorder = Recorder(run_folder(trainer), "alarms", enabled=trainer.is_global_zero)

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._format in (None, FormatPaidWhileAccuracyFalls()):
            return  # not every task has components of the names that are usual
        known = pl_module.rewards.weights
        for setting in ("paid", "goal"):
            if (name := getattr(self._format, setting)) not in known:
                raise ValueError(
                    f"Alarms.format_paid_while_accuracy_falls.{setting}={name!r} is no component "
                    f"of this run: choose from {sorted(known)}, or give null in place of the alarm."
                )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._recorder.rewind(pl_module.rollout)

    def after_update(
        self, module: FineTuning, batch: RolloutBatch, metrics: Mapping[str, float | None]
    ) -> None:
        reading = take_reading(batch, metrics)
        if len(self._start) < NUM_START:
            self._start.append(reading)
        most = max((alarm.num_readings for alarm in self.alarms), default=1)
        self._recent = [*self._recent, reading][-most:]
        findings = {alarm.name: alarm.judge(self._start, self._recent) for alarm in self.alarms}
        rows = [
            {
                "alarm": name,
                "event": "begins" if finding.is_on else "ends",
                "value": finding.value,
                "threshold": finding.threshold,
                "message": finding.message,
            }
            for name, finding in findings.items()
            if finding.is_on != self.findings.get(name, Finding()).is_on
        ]
        self.findings = findings
        self._recorder.append(rows, rollout=batch.rollout, step=module.trainer.global_step)
        is_on = {names.alarm(name): float(finding.is_on) for name, finding in findings.items()}
        log_scalars(module.trainer, is_on, x=batch.rollout)
        for row in rows:
            if row["event"] == "begins" and row["alarm"] not in self._has_warned:
                self._has_warned.add(str(row["alarm"]))
                rank_zero_warn(f"rollout {batch.rollout}, {row['alarm']}: {row['message']}")

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": [asdict(reading) for reading in self._start],
            "recent": [asdict(reading) for reading in self._recent],
            "findings": {name: asdict(finding) for name, finding in self.findings.items()},
            "has_warned": sorted(self._has_warned),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start = [Reading(**values) for values in state_dict["start"]]
        self._recent = [Reading(**values) for values in state_dict["recent"]]
        self.findings = {n: Finding(**values) for n, values in state_dict["findings"].items()}
        self._has_warned = set(state_dict["has_warned"])
