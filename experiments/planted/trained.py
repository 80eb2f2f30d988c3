"""Parts 2 and 3: the signals of a damaged model in training, and what the policy did there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scores import Cell, score

from tropism.measurements.layer_names import LinearSite
from tropism.measurements.records import read

NUM_ROLLOUTS = 100
UPDATE_NORMS_AFTER = (8, 24, 100)
Z_NAMES = ("pooled_z", "evidence_z")


def fit(seed: int, *, shuffled: bool) -> Path:
    """A run of the default policy; its folder."""
    name = f"{seed}_shuffled" if shuffled else f"{seed}_rewarded"
    folder = Path("runs") / "planted" / name
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        Path(sys.executable).parent / "tropism",
        "fit",
        "--config",
        Path(__file__).parent / "planted.yaml",
        f"--seed_everything={seed}",
        f"--model.init_args.model.name=organism-planted-{seed}",
        f"--model.init_args.shuffle_rewards={str(shuffled).lower()}",
        f"--trainer.logger.init_args.version={name}",
        f"--data.init_args.num_rollouts={NUM_ROLLOUTS}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    (folder / "done").touch()
    return folder


def trained(seed: int, damaged: frozenset[str]) -> list[Cell]:
    """AUC of the signals while the model trains."""
    folder = fit(seed, shuffled=False)
    table = read(folder, "pressure")
    columns = {
        "raw": table["raw_sq"],
        "debiased": table["debiased_sq"],
        "snr": table["debiased_sq"].clip(lower=0) / table["raw_sq"],
        "null_z": table["null_z"],
        "consistency": table["consistency"],
    }
    readings: dict[str, dict[LinearSite, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, values in columns.items():
        for layer, module, value in zip(table["layer"], table["module"], values, strict=True):
            if np.isfinite(value):
                readings[name][LinearSite("", int(layer), module)].append(float(value))
    norms = read(folder, "update_norms")
    sites = [
        LinearSite("", int(layer), module)
        for layer, module in dict.fromkeys(zip(norms["layer"], norms["module"], strict=True))
    ]
    signals = {
        name: [float(np.mean(found[site])) if site in found else None for site in sites]
        for name, found in readings.items()
    }
    cells = score(NUM_ROLLOUTS, signals, sites, damaged)
    for after in UPDATE_NORMS_AFTER:
        values = {
            (layer, module): value
            for rollout, layer, module, value in zip(
                norms["rollout"], norms["layer"], norms["module"], norms["update_norm"], strict=True
            )
            if rollout == after - 1
        }
        update = {"update_norm": [values[site.layer, site.module] for site in sites]}
        cells += score(after, update, sites, damaged)
    return cells


def decisions(seed: int, *, shuffled: bool) -> list[Cell]:
    """How often the policy acted, and on what evidence."""
    folder = fit(seed, shuffled=shuffled)
    lines = (folder / "records" / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    applied = sum(row["status"] == "applied" for row in rows)
    cells: list[Cell] = [(NUM_ROLLOUTS, "applied", applied, None)]
    for row in rows:
        value = row["decision"]["value"]
        for name in Z_NAMES:
            if value.get(name) is not None:
                cells.append((row["rollout"], name, value[name], None))
    return cells
