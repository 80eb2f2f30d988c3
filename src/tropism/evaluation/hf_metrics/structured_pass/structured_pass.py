"""Strict pass rate of structured output, as a metric of ``evaluate``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate

from tropism.evaluation.statistics import wilson_interval
from tropism.tasks.structured_layout import Layout
from tropism.tasks.structured_verdict import plain, strict

DESCRIPTION = """
Share of answers that are exactly what was asked: format, fence, commentary, wrapper, count, keys,
types, bounds, and strings that are neither blank nor copied from the prompt.
"""
INPUTS = """
Args:
    predictions: the answers of a model, as text.
    references: for each answer "schema" (JSON Schema of one object, as JSON), "layout" (JSON with
        the fields of tropism.tasks.structured_layout.Layout; "" for one plain JSON object) and
        "prompt" (what the model read).

Returns:
    "structured_pass", the bounds "ci_low" and "ci_high" of its 95 % Wilson interval, and "n".
"""


class StructuredPass(evaluate.Metric):  # type: ignore[misc]
    """``compute(predictions=[answer], references=[{"schema": "{...}", "layout": "", ...}])``."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        reference = {"schema": text, "layout": text, "prompt": text}
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": reference}),
        )

    def _compute(
        self, predictions: Sequence[str], references: Sequence[Mapping[str, str]]
    ) -> dict[str, Any]:
        passed = sum(map(_passes, predictions, references))
        rate = wilson_interval(passed, len(predictions))
        bounds = {"ci_low": rate.low, "ci_high": rate.high, "n": rate.n}
        return {"structured_pass": rate.value, **bounds}


def _passes(answer: str, reference: Mapping[str, str]) -> bool:
    schema, prompt = json.loads(reference["schema"]), reference["prompt"]
    if not reference["layout"]:
        return plain(answer, schema, prompt)["pass"] == 1.0
    fields = json.loads(reference["layout"])
    if fields.get("count") is not None:
        fields["count"] = tuple(fields["count"])
    return strict(answer, schema, Layout(**fields), prompt)["pass"] == 1.0
