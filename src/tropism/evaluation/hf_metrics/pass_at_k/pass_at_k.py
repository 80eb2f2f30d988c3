"""Unbiased pass@k over prompts, as a metric of ``evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from tropism.evaluation.pass_at_k import pass_at_k

DESCRIPTION = """
Chance that at least one of k samples of a prompt is right, without bias (Chen et al. 2021), and
its mean over prompts.
"""
INPUTS = """
Args:
    predictions: for each prompt, the verdicts of its samples: 1 for right, 0 for wrong.
    k: one or more k, none above the number of samples of any prompt; [1] by default.

Returns:
    "pass@k" for each k, and "n", the number of prompts.
"""


class PassAtK(evaluate.Metric):  # type: ignore[misc]
    """``compute(predictions=[[1, 0], [0, 0]], k=[1, 2])`` gives pass@1 0.25 and pass@2 0.5."""

    def _info(self) -> evaluate.MetricInfo:
        verdicts = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Chen et al. 2021, 2107.03374, section 2.1",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": verdicts}),
        )

    def _compute(
        self, predictions: Sequence[Sequence[int]], k: Sequence[int] = (1,)
    ) -> dict[str, Any]:
        rates: dict[str, Any] = {}
        for number in k:
            values = [pass_at_k(len(own), sum(own), number) for own in predictions]
            rates[f"pass@{number}"] = sum(values) / len(values)
        return {**rates, "n": len(predictions)}
