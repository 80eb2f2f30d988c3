"""This project's metrics for Hugging Face's ``evaluate``, to be loaded by path.

By name ``evaluate.load`` looks on the hub first. Each metric's file comes in a folder of its name:

    import evaluate
    from tropism.evaluation.hf_metrics import path_of

    pass_at_k = evaluate.load(path_of("pass_at_k"))
    pass_at_k.compute(predictions=[[1, 0, 1, 0], [0, 0, 0, 0]], k=[1, 2])
"""

from __future__ import annotations

from pathlib import Path

METRICS = ("pass_at_k", "structured_pass")


def path_of(name: str) -> str:
    """What to give to ``evaluate.load``.

    Raises:
        ValueError: No such metric.
    """
    if name not in METRICS:
        raise ValueError(f"metric {name!r} is unknown; choose from {METRICS}.")
    return str(Path(__file__).parent / name / f"{name}.py")
