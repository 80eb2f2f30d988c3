"""Running metrics of an evaluation loop (torchmetrics: summed over ranks), and baselines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from tropism.evaluation.statistics import Estimate, wilson_interval
from tropism.scoring import score_completions
from tropism.tasks.base import Task
from tropism.types import Prompt

Score = Mapping[str, float | None]


class PassRate(Metric):
    """Share of verdicts that pass (reach 1), with its Wilson interval; None has not judged.

    A torchmetrics metric: counts are summed over ranks when it is computed.

    Args:
        confidence: Of the interval, in (0, 1).
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    passed: Tensor
    judged: Tensor

    def __init__(self, confidence: float = 0.95, **options: Any) -> None:
        super().__init__(**options)
        self.confidence = confidence
        for state in ("passed", "judged"):
            self.add_state(state, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, verdicts: Sequence[float | None]) -> None:
        """Count some verdicts."""
        judged = [verdict for verdict in verdicts if verdict is not None]
        self.passed += sum(verdict >= 1.0 for verdict in judged)
        self.judged += len(judged)

    def compute(self) -> dict[str, Tensor]:
        """``value``, ``low``, ``high`` (NaN where nothing was judged) and ``n``."""
        passed, n = int(self.passed), int(self.judged)
        nothing = Estimate(math.nan, math.nan, math.nan, 0)
        rate = wilson_interval(passed, n, self.confidence) if n else nothing
        # fp64: torchmetrics takes any tensor, and records are to have what statistics gave.
        return {name: torch.tensor(v, dtype=torch.float64) for name, v in vars(rate).items()}

    def estimate(self) -> Estimate | None:
        """The same as an ``Estimate``; None where nothing was judged."""
        value, low, high, n = (number.item() for number in self.compute().values())
        return Estimate(value, low, high, int(n)) if n else None


class TaskScores:
    """Running scores of one task: its pass rate, and the mean of each component.

    Args:
        task: Its primary component is what passes.
        device: Where ranks exchange their counts.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._primary = task.primary
        self.passed = PassRate().to(device)
        self.means = {
            component: MeanMetric(nan_strategy="ignore").to(device) for component in task.components
        }

    def update(self, scores: Sequence[Score]) -> None:
        """Take in the scores of some completions, none at all included."""
        self.passed.update([score[self._primary] for score in scores])
        for component, mean in self.means.items():
            values = [math.nan if (v := score[component]) is None else v for score in scores]
            mean.update(torch.tensor(values, device=mean.device))

    def component_means(self) -> dict[str, float]:
        """Mean of each component over the completions that it judged, if any."""
        means = {component: float(mean.compute()) for component, mean in self.means.items()}
        return {component: mean for component, mean in means.items() if math.isfinite(mean)}


def pass_rate(scores: Iterable[Score], primary: str) -> Estimate | None:
    """Pass rate over the answers that ``primary`` judged, with its 95 % Wilson interval.

    None where it judged none.
    """
    rate = PassRate()
    rate.update([score[primary] for score in scores])
    return rate.estimate()


def baseline_rates(task: Task, prompts: Sequence[Prompt]) -> dict[str, Estimate]:
    """What the task's model-free answers reach on the same prompts."""
    tasks = {task.name: task}
    rates = {
        name: pass_rate(
            [score_completions(tasks, p, [answer(p)])[0] for p in prompts], task.primary
        )
        for name, answer in task.baselines().items()
    }
    return {name: rate for name, rate in rates.items() if rate is not None}
