"""What of a finished run goes into the study's committed tables: one row per evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from tropism.measurements.ceiling import by_gain, ceiling, only, ridge, shuffled
from tropism.measurements.metrics import PHASES
from tropism.measurements.records import read

READ_PROBES = ("SignalShrink", "GainSteps", "Depth", "TopBudget", "Sensitivity", "GradientShare")
"""Policies that decide on what probes measure, alone or inside a control. Others are probed only so
that their measurements stand beside: a fixed plan could do without, and does not pay for them."""


def rows(cell: Mapping[str, Any], run: Path) -> pd.DataFrame:
    """Scores, drift and cost of a run, at each of its evaluations.

    Args:
        cell: Facts that the sweep writes itself; what stands there is left out here.
        run: The run folder.

    Returns:
        Columns twin, learning_rate, group_size, rollout, held_out (greedy pass rate on held-out
        prompts of the trained skills), held_out_n, other (on skills never trained on), other_n,
        kl_in, kl_out (forward KL from the starting policy, nats per token), seconds (the
        processor's) and tokens (of training, up to there; without probes in an arm that could do
        without them), seconds_probe (what probes took), reward (mean of the rollouts since
        the evaluation before), trainable_params (now), trainable_params_mean (up to there),
        noise_scale (of all readings up to there), decisions_applied (up to there).
    """
    text = (run / "config.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(text)["model"]["init_args"]
    steps, table = read(run, "steps"), _scores(run)
    spent = _seconds(steps)
    paid = PHASES if any(f".{name}\n" in text for name in READ_PROBES) else PHASES[:-1]
    seconds = sum(spent[phase] for phase in paid)
    # An evaluation of rollout r is of the weights before update r.
    done = [steps["rollout"] < rollout for rollout in table["rollout"]]
    since = [0, *table["rollout"][:-1]]
    applied = read(run, "decisions")
    if len(applied):
        applied = applied[applied["status"] == "applied"]
    table = table.assign(
        seconds=[seconds[before].sum() for before in done],
        seconds_probe=[spent["probe"][before].sum() for before in done],
        tokens=[steps["tokens"][before].sum() for before in done],
        reward=[
            steps["reward"][before & (steps["rollout"] >= first)].mean()
            for before, first in zip(done, since, strict=True)
        ],
        trainable_params=[
            steps["trainable_params"][before].iloc[-1] if before.any() else None for before in done
        ],
        trainable_params_mean=[steps["trainable_params"][before].mean() for before in done],
        noise_scale=_noise_scale(run, table["rollout"]),
        decisions_applied=[
            int((applied["rollout"] < rollout).sum()) if len(applied) else 0
            for rollout in table["rollout"]
        ],
    )
    facts = {
        "twin": "planted" if "planted" in settings["model"]["name"] else "organism",
        "learning_rate": settings["optimizer"]["learning_rate"],
        "group_size": settings["group_size"],
    }
    for place, (name, value) in enumerate(
        (name, value) for name, value in facts.items() if name not in cell
    ):
        table.insert(place, name, value)
    return table.round(
        {"seconds": 2, "seconds_probe": 2, "kl_in": 6, "kl_out": 6, "reward": 4, "noise_scale": 2,
         "trainable_params_mean": 0}
    )  # fmt: skip


def _scores(run: Path) -> pd.DataFrame:
    """rollout, held_out, held_out_n, other, other_n, kl_in, kl_out."""
    evals, drift = read(run, "evals"), read(run, "kl_drift")
    drift = drift[drift["direction"] == "forward"]
    parts = []
    for domain, score, kl in (("in", "held_out", "kl_in"), ("out", "other", "kl_out")):
        own = evals[evals["domain"] == domain].set_index("rollout")
        parts += [own["value"].rename(score), own["n"].rename(f"{score}_n")]
        parts.append(drift[drift["domain"] == domain].set_index("rollout")["kl"].rename(kl))
    table = pd.concat(parts, axis=1).sort_index().reset_index()
    columns = ["rollout", "held_out", "held_out_n", "other", "other_n", "kl_in", "kl_out"]
    return table[columns].round({"held_out": 6, "other": 6})


def _seconds(steps: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Processor seconds of each rollout's phases, on one thread what they take on an idle machine.

    The record has the processor's time of the whole rollout; phases share it as they do wall time.
    """
    wall = {phase: steps[f"seconds_{phase}"] for phase in PHASES}
    share = steps["seconds_processor"] / sum(wall.values())
    return {phase: seconds * share for phase, seconds in wall.items()}


def _noise_scale(run: Path, rollouts: pd.Series[int]) -> list[float | None]:
    """Raw minus debiased over debiased energy, of all linears and all readings before each rollout.

    The number of groups at which an update's signal equals its noise. None without a reading, or
    without signal.
    """
    pressure = read(run, "pressure")
    if not len(pressure):
        return [None] * len(rollouts)
    energy = pressure.groupby("rollout")[["raw_sq", "debiased_sq"]].sum()
    sums = [energy[energy.index < rollout].sum() for rollout in rollouts]
    return [
        (found["raw_sq"] - found["debiased_sq"]) / found["debiased_sq"]
        if found["debiased_sq"] > 0
        else None
        for found in sums
    ]


def ceiling_rows(cell: Mapping[str, Any], run: Path) -> pd.DataFrame:
    """KL that step sizes could save at equal gain, on unseen prompts, at each reading of a run.

    Returns:
        Columns rollout (of the reading), steps (who proposes), kl_ratio, shared_kl.
    """
    gains, moves = read(run, "gains"), read(run, "moves")
    sites = gains[gains["rollout"] == gains["rollout"].iloc[0]]
    top = sites["layer"] >= sites["layer"].max() * 2 / 3
    proposals = {
        **{f"ridge {strength:g}": ridge(strength) for strength in (0.1, 1, 10)},
        "by gain": by_gain,
        "by gain, shuffled": shuffled(sites["module"].to_list()),
        "top third": only(top.to_list()),
    }
    tables = [
        ceiling(own, proposals, rng=np.random.default_rng([int(rollout)])).assign(rollout=rollout)
        for rollout, own in moves.groupby("rollout")
    ]
    table = pd.concat(tables, ignore_index=True)
    return table[["rollout", "steps", "kl_ratio", "shared_kl"]].round(4)
