"""What the study found, as one page: ``python -m experiments.study.report`` rewrites results.md.

Everything there comes from the tables in ``results/``; stages that have not run are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from experiments.markdown import interval_text, markdown_table
from experiments.study import contrasts, positive_control, speed
from paper_figures import arms, study
from paper_figures.intervals import Interval, mean_interval

FOLDER = Path(__file__).resolve().parent
STAGES = ("choose", "main", "planted", "groups", "rewards", "controls", "gain", "oracle")
BASELINES = {"planted": "uniform", "rewards": "fixed", "controls": "uniform"}


def main() -> None:
    """Write the page, and say where."""
    page = FOLDER / "results.md"
    page.write_text(report(arms.read_results(FOLDER / "results")), encoding="utf-8")
    print(f"wrote {page}")


def report(results: pd.DataFrame) -> str:
    """The page.

    Args:
        results: As ``paper_figures.arms.read_results`` gives it.
    """
    there = set(results["stage"])
    cells = results[study.CELL].drop_duplicates()["stage"].value_counts()
    counts = ", ".join(f"{stage} {cells[stage]}" for stage in STAGES if stage in there)
    missing = ", ".join(stage for stage in STAGES if stage not in there) or "none"
    parts = [
        "# Results of the study",
        "Rewritten by `python -m experiments.study.report` from `results/`. What is compared, and "
        "why, was registered before: [../README.md](../README.md). Intervals are 95 %.",
        f"Runs: {counts}. Stages not run: {missing}.",
    ]
    if "choose" in there:
        parts += _choose(results)
    if "main" in there:
        parts += _main(results)
    for stage in STAGES[2:]:
        if stage in there:
            own = {"groups": _groups, "gain": _gain, "oracle": _oracle}.get(stage)
            parts += own(results) if own is not None else _secondary(results, stage)
    return "\n\n".join(parts) + "\n"


def _choose(results: pd.DataFrame) -> list[str]:
    level, rates = contrasts.chosen_rates(results)
    rows = results[results["stage"] == "choose"]
    ends = study.last(rows)
    text = (
        f"Level L is a held-out pass of {level:.3f}. R: rate with the best last held-out pass; K: "
        "with the least KL at L, among those at which all seeds reach it."
    )
    table = [
        (
            arm,
            f"{rates[arm].reward:g}",
            f"{rates[arm].kl:g}",
            *_over_rates(ends[ends["arm"] == arm], sorted(set(ends["learning_rate"]))),
            _unfinished(ends, arm),
        )
        for arm in sorted(rates, key=arms.order)
    ]
    every = [f"{rate:g}" for rate in sorted(set(ends["learning_rate"]))]
    head = ("arm", "R", "K", *every, "")
    return ["## Stage 1: learning rates (last held-out pass)", text, markdown_table(head, table)]


def _over_rates(ends: pd.DataFrame, rates: Iterable[float]) -> list[str]:
    means = ends.groupby("learning_rate")["held_out"].mean()
    return [f"{means[rate]:.3f}" if rate in means else "" for rate in rates]


def _main(results: pd.DataFrame) -> list[str]:
    found = contrasts.primary(results)
    rows = [
        (
            f"log KL at {row['level']:.3f}" if row["endpoint"] == "A" else "pass at equal seconds",
            row["arm"],
            row["control"],
            f"{row['arm_value']:.3f}",
            f"{row['control_value']:.3f}",
            f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})",
            f"{row['n']}",
            f"{row['p']:.3f}",
            f"{row['corrected']:.3f}",
        )
        for _, row in found.iterrows()
    ]
    head = ("endpoint", "arm", "against", "arm's", "control's", "difference", "seeds", "p", "Holm")
    level, rates = contrasts.chosen_rates(results)
    own = results[results["stage"] == "main"]
    at_best = pd.concat(
        own[(own["arm"] == arm) & (own["learning_rate"] == rate.reward)]
        for arm, rate in rates.items()
    )
    return [
        "## Stage 2: primary contrasts",
        markdown_table(head, rows),
        f"L is {level:.3f}; where not all seeds of both arms reach it, half way takes its place.",
        "## Stage 2: every arm at its K, where it first reaches L",
        _at_level(own, level, rates),
        "## Stage 2: every arm at its R, last evaluation",
        _arms_table(at_best),
    ]


def _at_level(rows: pd.DataFrame, level: float, rates: dict[str, contrasts.Rates]) -> str:
    """A row for each arm: what reaching the level took, and cost on what is not trained."""
    table = []
    for arm in sorted(rates, key=arms.order):
        own = rows[(rows["arm"] == arm) & (rows["learning_rate"] == rates[arm].kl)]
        if own.empty:
            continue
        found = {
            column: contrasts.reached(own, column, level).dropna()
            for column in ("kl_in", "kl_out", "other_drop", "rollout", "seconds")
        }
        lost = mean_interval(found["other_drop"])
        table.append(
            (
                arm,
                f"{rates[arm].kl:g}",
                f"{np.exp(np.log(found['kl_in']).mean()):.4f}",
                f"{np.exp(np.log(found['kl_out']).mean()):.4f}",
                f"{lost.value:+.3f} ({lost.low:+.3f} to {lost.high:+.3f})",
                f"{found['rollout'].mean():.0f}",
                f"{found['seconds'].mean():.1f}",
                f"{len(found['kl_in'])} of {own['seed'].nunique()}",
            )
        )
    head = ("arm", "rate", "KL", "KL on others", "other pass lost", "rollouts", "seconds",
            "seeds that reach it")  # fmt: skip
    return markdown_table(head, table)


def _secondary(results: pd.DataFrame, stage: str) -> list[str]:
    rows = results[results["stage"] == stage]
    parts = [f"## Stage {STAGES.index(stage) + 1}: {stage}"]
    for rate, own in rows.groupby("learning_rate"):
        ends, baseline = study.last(own), BASELINES[stage]
        reference = ends[ends["arm"] == baseline]
        if reference.empty:
            continue
        parts += [
            f"Learning rate {rate:g}; held-out pass minus {baseline}'s, paired by seed:",
            _arms_table(own, study.contrasts(ends, "held_out", reference)),
        ]
    return parts


def _groups(results: pd.DataFrame) -> list[str]:
    rows = results[results["stage"] == "groups"]
    table = []
    for (size, rate), own in rows.groupby(["group_size", "learning_rate"]):
        ends = study.last(own)
        noise = own[own["noise_scale"].notna()].groupby("seed")["noise_scale"].last()
        table.append(
            (
                f"{size}",
                f"{32 // size}",
                f"{rate:g}",
                interval_text(mean_interval(ends["held_out"], ends["held_out_n"])),
                f"{ends['kl_in'].mean():.3f}",
                f"{ends['seconds'].mean():.0f}",
                f"{noise.median():.0f}" if len(noise) else "",
            )
        )
    head = ("group size", "groups", "rate", "last held-out pass", "KL", "seconds", "noise scale")
    return ["## Stage 4: group size at equal samples", markdown_table(head, table)]


def _gain(results: pd.DataFrame) -> list[str]:
    rows = results[results["stage"] == "gain"]
    num = int(rows.groupby(["arm", "learning_rate"])["seed"].nunique().min())
    head = ("log KL at", "arm", "against", "difference", "seeds", "p", "Holm")
    table = [
        (
            f"{row['level']:.3f}",
            row["arm"],
            row["control"],
            f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})",
            f"{row['n']}",
            f"{row['p']:.3f}",
            f"{row['corrected']:.3f}",
        )
        for _, row in speed.primary(results).iterrows()
    ]
    parts = [
        "## Stage 7: steps by gain, at equal speed",
        "Log KL at the level above uniform's line at as many rollouts, mean over an arm's rates."
        + ("" if num == speed.SEEDS else f" Unfinished: {num} of {speed.SEEDS} seeds."),
        markdown_table(head, table),
    ]
    for rate, own in rows.groupby("learning_rate"):
        parts += [f"Learning rate {rate:g}, last evaluation:", _arms_table(own)]
    return parts


def _oracle(results: pd.DataFrame) -> list[str]:
    ends = positive_control.last_passes(results)
    rates = sorted(set(ends["learning_rate"]))
    table = []
    for arm in positive_control.ARMS:
        own = ends[ends["arm"] == arm]
        table.append((arm, *_over_rates(own, rates), _unfinished(ends, arm)))
    pairs = [
        (
            arm,
            control,
            interval_text(positive_control.difference(ends, arm, control), "+"),
        )
        for arm, control in positive_control.CONTRASTS
    ]
    return [
        "## Stage 8: the positive control at its own best rate (last held-out pass)",
        markdown_table(("arm", *(f"{rate:g}" for rate in rates), ""), table),
        "Each at its best rate, paired by model:",
        markdown_table(("arm", "against", "difference"), pairs),
    ]


def _arms_table(rows: pd.DataFrame, differences: pd.DataFrame | None = None) -> str:
    """A row for each arm; every arm at one rate."""
    table = []
    for arm in sorted(rows["arm"].unique(), key=arms.order):
        own = rows[rows["arm"] == arm]
        ends = study.last(own)
        line = [
            arm,
            interval_text(mean_interval(ends["held_out"], ends["held_out_n"])),
            f"{-ends['other_drop'].mean():+.3f}",
            f"{ends['kl_in'].mean():.3f}",
            f"{ends['kl_out'].mean():.3f}",
            f"{ends['seconds'].mean():.0f}",
            f"{ends['trainable_params_mean'].mean() / 1000:.0f}",
            f"{ends['decisions_applied'].mean():.1f}",
            f"{len(ends)}{_unfinished(rows, arm)}",
        ]
        if differences is not None:
            found = differences[differences["arm"] == arm]
            line.insert(2, "" if found.empty else interval_text(Interval(*found.iloc[0][1:5]), "+"))
        table.append(tuple(line))
    head = ["arm", "held-out", "other skills", "KL", "KL on others", "seconds",
            "mean trainable, 10³", "decisions applied", "seeds"]  # fmt: skip
    if differences is not None:
        head.insert(2, "difference")
    return markdown_table(tuple(head), table)


def _unfinished(rows: pd.DataFrame, arm: str) -> str:
    found = study.unfinished(rows)
    return f", {found[arm]}" if arm in found else ""


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
