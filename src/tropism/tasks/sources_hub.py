"""Benchmarks from the Hugging Face hub, brought to the columns that the folders have.

The commit that the hub names is the one that is loaded, and the one that is recorded; without a
network whatever is in the cache of ``datasets`` is loaded, and no commit is recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tropism.tasks.row_checks import checked
from tropism.tasks.row_files import Row

TIMEOUT_SECONDS = 10.0

HUB: Mapping[str, str] = {
    "gsm8k": "openai/gsm8k",
    "math": "EleutherAI/hendrycks_math",
    "math500": "HuggingFaceH4/MATH-500",
    "arc_easy": "allenai/ai2_arc",
    "arc_challenge": "allenai/ai2_arc",
    "openbookqa": "allenai/openbookqa",
    "mmlu": "cais/mmlu",
    "mbpp": "google-research-datasets/mbpp",
    "humaneval": "openai/openai_humaneval",
    "ifeval": "google/IFEval",
    "jsonschemabench": "epfl-dlab/JSONSchemaBench",
}
"""Ids of the data sets; what is not here is read from a folder only."""

MATH_CONFIGS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
CONFIGS: Mapping[str, str] = {
    "gsm8k": "main",
    "arc_easy": "ARC-Easy",
    "arc_challenge": "ARC-Challenge",
    "openbookqa": "main",
    "mmlu": "all",
    "mbpp": "full",
}


def read_hub(benchmark: str, part: str) -> tuple[list[Row], str | None]:
    """Rows of one part, and the commit that they are of.

    Raises:
        ValueError: It is not on the hub, or cannot be had from it.
    """
    if benchmark not in HUB:
        raise ValueError(
            f"{benchmark} is not on the hub: set `data` of the task, or the environment's "
            f"TROPISM_DATA, to a folder with {benchmark}/."
        )
    match benchmark:
        case "math":
            held_out, _ = _load("math500", None, "test")
            problems = {row["problem"] for row in held_out}
            rows, revision = [], None
            for config in MATH_CONFIGS:
                of_config, revision = _load(benchmark, config, "test")
                rows += [row for row in of_config if row["problem"] not in problems]
        case "jsonschemabench":
            rows, revision = [], None
            for split in ("train", "val", "test"):
                of_split, revision = _load(benchmark, part, split)
                rows += of_split
        case "mbpp" if part == "all":
            rows, revision = [], None
            for split in ("prompt", "test", "validation", "train"):
                of_split, revision = _load(benchmark, "full", split)
                rows += of_split
        case _:
            rows, revision = _load(benchmark, CONFIGS.get(benchmark), _split(benchmark, part))
    place = f"hub:{HUB[benchmark]}, {part}"
    return [_row(benchmark, row, i, f"{place}, row {i}") for i, row in enumerate(rows)], revision


def _row(benchmark: str, row: Mapping[str, Any], index: int, place: str) -> Row:
    try:
        return checked(benchmark, converted(benchmark, row, index), place)
    except KeyError as error:
        raise ValueError(f"{place}: there is no column {error}, only {sorted(row)}.") from error


def _split(benchmark: str, part: str) -> str:
    return {("mmlu", "val"): "validation", ("ifeval", "test"): "train"}.get((benchmark, part), part)


def converted(benchmark: str, row: Mapping[str, Any], index: int) -> Row:
    """A row of the hub with the columns that the folders have.

    Answer keys are looked up among the row's own labels: in some rows of ARC those are 1 to 4.
    """
    if benchmark in ("arc_easy", "arc_challenge", "openbookqa"):
        return {
            "id": row["id"],
            "question": row["question_stem" if benchmark == "openbookqa" else "question"],
            "choices": list(row["choices"]["text"]),
            "answer_idx": _place(row["answerKey"], list(row["choices"]["label"])),
        }
    if benchmark == "mmlu":
        return {
            "id": f"{row['subject']}-{index}",
            "question": row["question"],
            "choices": list(row["choices"]),
            "answer_idx": int(row["answer"]),
            "subject": row["subject"],
        }
    if benchmark == "jsonschemabench":
        schema = row["json_schema"]
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return {"unique_id": row["unique_id"], "json_schema": schema}
    if benchmark == "ifeval":  # Arrow gives every row the columns of all
        given = [{k: v for k, v in one.items() if v is not None} for one in row["kwargs"]]
        return {**row, "kwargs": given}
    return dict(row)


def _place(key: str, labels: list[str]) -> int:
    return labels.index(key) if key in labels else -1


def _load(benchmark: str, config: str | None, split: str) -> tuple[list[Row], str | None]:
    repository = HUB[benchmark]
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{benchmark} comes from the hub by the `datasets` library, which is not installed: "
            "install it, or set `data` of the task (or TROPISM_DATA) to a folder with the data."
        ) from error
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        revision = HfApi().dataset_info(repository, timeout=TIMEOUT_SECONDS).sha
    except (HTTPError, OSError):  # no network, or HF_HUB_OFFLINE: the cache may have it
        revision = None
    try:
        loaded = datasets.load_dataset(repository, config, split=split, revision=revision)
    except (HTTPError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{benchmark}: {repository!r} cannot be loaded from the hub ({error}). Set `data` of "
            "the task, or the environment's TROPISM_DATA, to a folder with the data."
        ) from error
    return [dict(row) for row in loaded], revision
