"""The averages of a causal tracing, for the figures of it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from paper_figures.intervals import mean_interval
from paper_figures.sources import MissingDataError, finished
from tropism.measurements.records import read
from tropism.measurements.traced_effects import effects

COMMAND = "tropism trace --config experiments/scalpel/trace.yaml"
TITLES = {
    "state": "state of one layer",
    "mlp": "MLPs of {window} layers",
    "attention": "attentions of {window} layers",
}


def collect(runs: Path) -> pd.DataFrame:
    """Average effect by kind, role and layer over the known facts, with its 95 % interval.

    Also, in every row: how many facts are known, and the mean p(answer), clean and corrupted.
    """
    run = finished(runs, "trace", command=COMMAND)[0]
    rows = read(run.folder, "causal_tracing").to_dict("records")
    known = pd.DataFrame([row for row in rows if row["is_known"]])
    if known.empty:
        raise MissingDataError(f"{run.folder} has no known fact: `{COMMAND}` with other facts")
    settings = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))["trace"]
    table = effects(rows).groupby(["kind", "role", "layer"], observed=True)["effect"]
    found = [(run.name, *key, *mean_interval(values)) for key, values in table]
    columns = ["run", "kind", "role", "layer", "effect", "low", "high", "num_facts"]
    means = pd.DataFrame(found, columns=columns)
    return means.assign(
        known=len(known),
        clean=known["clean"].mean(),
        corrupted=known["corrupted"].mean(),
        window=settings["tracing"]["window"],
    )


def title(data: pd.DataFrame, kind: str) -> str:
    """What is restored in a panel."""
    return TITLES[kind].format(window=data["window"].iloc[0])


def facts(data: pd.DataFrame) -> str:
    """How many facts, and the answer's probability with all and with nothing restored."""
    first = data.iloc[0]
    return (
        f"SmolLM2-135M, {first['known']} facts, "
        f"p(answer) {first['clean']:.2f} clean, {first['corrupted']:.2f} corrupted"
    )
