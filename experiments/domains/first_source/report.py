"""What both GRPO runs gained and which domain lagged: results.md, from the sweep's table.

    python -m experiments.domains.first_source.report

Intervals are 95 %, bootstrap over seeds, then prompts
(``paper_figures.intervals``); a gain takes the prompts before and after as drawn apart, although
they are the same ones, which widens it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pandas as pd
from experiments.markdown import interval_text, markdown_table
from paper_figures.intervals import Interval, difference_interval, mean_interval

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER / "results" / "first_source.csv"
WARM_UP = "sft"
ARMS = ("mixed", "loop")
WHY = ("mixed_share", "advantage_share", "gradient_share", "completion_length")
Passes = pd.DataFrame
"""[seeds]: pass rate and number of prompts (``value``, ``n``) of one evaluation."""


def main() -> None:
    """Write the page, and say where."""
    page = FOLDER / "results.md"
    page.write_text(report(pd.read_csv(SOURCE)), encoding="utf-8")
    print(f"wrote {page}")


def report(results: pd.DataFrame) -> str:
    """The page, as far as there are runs.

    Args:
        results: As the sweep writes it: arm, seed, and the columns of ``tables.py``.
    """
    seeds = results.groupby("arm")["seed"].nunique()
    counts = ", ".join(f"{arm} {seeds.get(arm, 0)}" for arm in (WARM_UP, *ARMS))
    parts = [
        "# Results of the first source's experiment, at this scale",
        "Rewritten by `python -m experiments.domains.first_source.report`. Greedy pass on held-out "
        f"prompts; in brackets 95 % intervals over seeds, then prompts. Seeds: {counts}.",
        "## Held-out pass",
        markdown_table(
            ("domain", "base", "after SFT", *(f"{arm}, last" for arm in ARMS)),
            _pass_rows(results),
        ),
        "## Gain over the warm-up",
        markdown_table(("domain", *ARMS, "loop - mixed", "seeds"), _gain_rows(results)),
    ]
    for arm in ARMS:
        if arm in seeds:
            parts += [f"## Which domain lags, and why: {arm}", lagging(results, arm)]
            parts += [markdown_table(_why_head(), _why_rows(results, arm)), _rewards(results, arm)]
    return "\n\n".join(parts) + "\n"


def gain(results: pd.DataFrame, arm: str, domain: str) -> Interval | None:
    """Last held-out pass minus that after the warm-up; None without seeds that have both."""
    after, before = passes(results, arm, domain), passes(results, WARM_UP, domain)
    return _paired(after, before)


def difference(results: pd.DataFrame, domain: str) -> Interval | None:
    """How much more ``loop`` gained than ``mixed``; None without seeds that have both.

    Both start from the same adapter, so that what they gained differs by their last evaluations.
    """
    one, other = (passes(results, arm, domain) for arm in reversed(ARMS))
    return _paired(one, other)


def _paired(one: Passes, other: Passes) -> Interval | None:
    common = one.index.intersection(other.index)
    if common.empty:
        return None
    one, other = one.loc[common], other.loc[common]
    return difference_interval(one["value"], other["value"], one["n"], other["n"])


def passes(
    results: pd.DataFrame, arm: str, domain: str, which: Literal["first", "last"] = "last"
) -> Passes:
    """Each seed's first or last evaluation."""
    own = results[(results["arm"] == arm) & (results["domain"] == domain)]
    own = own[own["measure"] == "pass"].sort_values("rollout")
    by_seed = own.groupby("seed")[["value", "n"]]
    return by_seed.first() if which == "first" else by_seed.last()


def lagging(results: pd.DataFrame, arm: str) -> str:
    """The trained domain that gained the least of what it could, in a sentence."""
    of_room = {}
    for domain in _trained(results):
        before, found = passes(results, WARM_UP, domain), gain(results, arm, domain)
        if found is not None and (room := 1 - float(before["value"].mean())) > 0:
            of_room[domain] = found.value / room
    if not of_room:
        return "No domain had room to gain."
    ranked = sorted(of_room, key=lambda domain: of_room[domain])
    listed = ", ".join(f"{domain} {of_room[domain]:+.0%}" for domain in ranked)
    return f"Lagging: **{ranked[0]}**. Gain as a share of what was left to gain: {listed}."


def _pass_rows(results: pd.DataFrame) -> Iterable[tuple[str, ...]]:
    for domain in _domains(results):
        found = [passes(results, WARM_UP, domain, "first")]
        found += [passes(results, arm, domain) for arm in (WARM_UP, *ARMS)]
        yield (
            domain,
            *("" if p.empty else interval_text(mean_interval(p["value"], p["n"])) for p in found),
        )


def _gain_rows(results: pd.DataFrame) -> Iterable[tuple[str, ...]]:
    for domain in _domains(results):
        found = [gain(results, arm, domain) for arm in ARMS]
        found.append(difference(results, domain))
        seeds = ", ".join(str(interval.n) for interval in found if interval is not None)
        yield domain, *("" if i is None else interval_text(i, "+") for i in found), seeds


def _why_head() -> tuple[str, ...]:
    return ("domain", "rollouts", *(name.replace("_", " ") for name in WHY), "cosine with others")


def _why_rows(results: pd.DataFrame, arm: str) -> Iterable[tuple[str, ...]]:
    """A row for each domain and stretch between two evaluations; means over seeds."""
    own = results[results["arm"] == arm]
    means = own.groupby(["domain", "rollout", "measure"])["value"].mean()
    for domain in _trained(own):
        since = 0
        for rollout in sorted(own.loc[own["measure"] == "mixed_share", "rollout"].unique()):
            there = means.get(domain, pd.Series(dtype=float)).get(rollout, pd.Series(dtype=float))
            values = [there.get(name) for name in WHY]
            texts = ["" if v is None else f"{v:.1f}" if v > 1 else f"{v:.3f}" for v in values]
            mixed = _at(own, domain, "mixed_share", rollout)
            texts[0] = interval_text(mean_interval(mixed["value"], mixed["n"]), digits=2)
            cosines = _cosines(means, domain, rollout)
            yield domain, f"{since}-{rollout - 1}", *texts, cosines
            since = rollout


def _cosines(means: pd.Series[float], domain: str, rollout: int) -> str:
    found = []
    for (one, at, measure), value in means.items():
        kind, _, other = measure.partition("/")
        if kind == "cosine" and at == rollout and domain in (one, other):
            found.append(f"{other if one == domain else one} {value:+.2f}")
    return ", ".join(found)


def _rewards(results: pd.DataFrame, arm: str) -> str:
    """Component means and weights in the first and the last stretch, and what was decided."""
    own = results[results["arm"] == arm]
    means = own.groupby(["domain", "measure", "rollout"])["value"].mean()
    rows = []
    for (domain, measure), series in means.groupby(level=[0, 1]):
        kind, _, component = measure.partition("/")
        if kind == "reward":
            weight = means[domain, f"weight/{component}"]
            ends = (series.iloc[0], series.iloc[-1], weight.iloc[0], weight.iloc[-1])
            rows.append((domain, component, *(f"{value:.2f}" for value in ends)))
    decided = own[own["measure"].str.startswith("decisions/")]
    runs = own["seed"].nunique()
    sums = decided.groupby("measure")["value"].sum()
    said = ", ".join(f"{name.partition('/')[2]} {total:.0f}" for name, total in sums.items())
    head = ("domain", "component", "mean, first", "mean, last", "weight, first", "weight, last")
    table = markdown_table(head, rows)
    return f"{table}\n\nDecisions applied in {runs} runs: {said}." if said else table


def _at(own: pd.DataFrame, domain: str, measure: str, rollout: int) -> pd.DataFrame:
    chosen = (own["domain"] == domain) & (own["measure"] == measure) & (own["rollout"] == rollout)
    return own[chosen]


def _domains(results: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(results.loc[results["measure"] == "pass", "domain"]))


def _trained(results: pd.DataFrame) -> list[str]:
    trained = set(results.loc[results["measure"] == "mixed_share", "domain"])
    return [domain for domain in _domains(results) if domain in trained]


if __name__ == "__main__":
    main()
