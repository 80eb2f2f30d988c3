"""What of a finished run goes into the committed table: a row for each measure of each domain.

Measures at an evaluation: ``pass`` (greedy, held-out prompts), and ``seconds``. Over the rollouts
since the evaluation before, for a run of GRPO:

    mixed_share          share of the groups in which some completions pass and others do not
    completion_length    mean number of tokens
    reward/COMPONENT     mean of a reward component, unweighted
    weight/COMPONENT     its weight in the last of these rollouts
    advantage_share      the domain's part of the sum of squared advantages
    gradient_share       its part of the update's energy as the probes measure it (debiased, the sum
                         over its components without cross terms), mean over readings
    cosine/DOMAIN        of both domains' outcomes' gradients: mean over linears and readings
    decisions/KIND       decisions that were applied, of the domain ``all``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from tropism.measurements.metrics import PHASES
from tropism.measurements.records import read

COLUMNS = ("rollout", "domain", "measure", "value", "n")
OUTCOMES = ("accuracy", "pass")
"""Components that say whether a task is solved; every domain here has one of them."""
Measure = tuple[str, str, float, int]
"""Domain, measure, value, and how many prompts, groups, completions or readings it is the mean of.
"""


def rows(cell: Mapping[str, Any], run: Path) -> pd.DataFrame:
    """Every measure of a run, evaluation by evaluation.

    Args:
        cell: Facts that the sweep writes itself.
        run: The run folder.

    Returns:
        The columns ``COLUMNS``; ``rollout`` is that of the evaluation.

    Raises:
        ValueError: Not all completions of the run were recorded.
    """
    text = (run / "config.yaml").read_text(encoding="utf-8")
    model = yaml.safe_load(text)["model"]
    evals, steps = read(run, "evals"), read(run, "steps")
    is_grpo = model["class_path"].endswith("GRPO")
    training = Training(run, model["init_args"]["group_size"]) if is_grpo else None
    found = []
    since = 0
    for rollout, own in evals.groupby("rollout"):
        measures: list[Measure] = [
            (row.benchmark, "pass", row.value, row.n) for row in own.itertuples()
        ]
        spent = steps[(steps["rollout"] >= since) & (steps["rollout"] < rollout)]
        if len(spent):
            columns = [f"seconds_{phase}" for phase in PHASES]
            measures.append(("all", "seconds", float(spent[columns].sum().sum()), len(spent)))
            if training is not None:
                measures += training.between(since, rollout)
        found += [(rollout, *measure) for measure in measures]
        since = rollout
    return pd.DataFrame(found, columns=list(COLUMNS)).round({"value": 6})


class Training:
    """What the rollouts of a run of GRPO say of each domain.

    Args:
        run: The run folder.
        group_size: G.

    Raises:
        ValueError: Not all completions were recorded.
    """

    def __init__(self, run: Path, group_size: int) -> None:
        completions = read(run, "completions")
        # Ids of prompts begin with the name of their task.
        completions["domain"] = completions["prompt_id"].str.extract(r"^(\w+)", expand=False)
        sizes = completions.groupby(["rollout", "prompt_id"]).size()
        steps = read(run, "steps")
        is_whole = sizes.eq(group_size).all() and set(completions["rollout"]) == set(
            steps["rollout"]
        )
        if not is_whole:
            raise ValueError(
                f"{run}: groups of {group_size} are not recorded whole, in every rollout: give "
                "RolloutSamples every_n_rollouts: 1 and num_samples: null."
            )
        scores = pd.DataFrame(completions["components"].tolist(), index=completions.index)
        self._completions = completions.assign(passes=_outcome(scores))
        self._scores = scores.groupby(completions["domain"])
        self._domain_of = {
            component: domain
            for domain, own in self._scores
            for component in own.columns[own.notna().any()]
        }
        self._rewards = read(run, "rewards")
        self._gradients = read(run, "reward_gradients")
        self._decisions = read(run, "decisions")

    def between(self, first: int, last: int) -> Iterator[Measure]:
        """Measures over the rollouts from ``first`` to before ``last``."""
        own = _between(self._completions, first, last)
        squares = own["advantage"] ** 2
        for domain, mine in own.groupby("domain"):
            groups = mine.groupby(["rollout", "prompt_id"])["passes"].mean()
            yield domain, "mixed_share", mixed_share(groups), len(groups)
            yield domain, "completion_length", float(mine["num_tokens"].mean()), len(mine)
            if squares.sum() > 0:
                share = float(squares[mine.index].sum() / squares.sum())
                yield domain, "advantage_share", share, len(mine)
            scores = self._scores.get_group(domain).loc[mine.index]
            for component in (c for c, of in self._domain_of.items() if of == domain):
                mean = float(scores[component].mean())
                yield domain, f"reward/{_short(component)}", mean, len(mine)
        weights = self._rewards[self._rewards["rollout"] == last - 1]
        for row in weights.itertuples():
            domain = self._domain_of[row.component]
            yield domain, f"weight/{_short(row.component)}", float(row.weight), 1
        yield from self._of_readings(first, last)
        applied = _between(self._decisions[self._decisions["status"] == "applied"], first, last)
        for kind in dict.fromkeys(self._decisions["kind"]):
            yield "all", f"decisions/{kind}", float((applied["kind"] == kind).sum()), 1

    def _of_readings(self, first: int, last: int) -> Iterator[Measure]:
        gradients = _between(self._gradients, first, last)
        readings = gradients["rollout"].unique()
        shares = self._rewards[self._rewards["rollout"].isin(readings)].dropna(
            subset="gradient_share"
        )
        by_domain = shares.assign(domain=shares["component"].map(self._domain_of))
        for domain, mine in by_domain.groupby("domain"):
            sums = mine.groupby("rollout")["gradient_share"].sum()
            yield domain, "gradient_share", float(sums.mean()), len(sums)
        outcomes = {of: c for c, of in self._domain_of.items() if _short(c) in OUTCOMES}
        for one, other in combinations(sorted(outcomes), 2):
            pair = {outcomes[one], outcomes[other]}
            is_pair = gradients["component"].isin(pair) & gradients["other"].isin(pair)
            cosines = gradients[is_pair & (gradients["component"] != gradients["other"])]
            cosines = cosines.dropna(subset="cosine")
            if len(cosines):
                mean = float(cosines["cosine"].mean())
                yield one, f"cosine/{other}", mean, cosines["rollout"].nunique()


def mixed_share(pass_rates: pd.Series[float]) -> float:
    """Share of the groups, by their pass rates, that hold both outcomes: those that GRPO sees."""
    return float(pass_rates.between(0, 1, inclusive="neither").mean())


def _between(table: pd.DataFrame, first: int, last: int) -> pd.DataFrame:
    return table[(table["rollout"] >= first) & (table["rollout"] < last)]


def _outcome(scores: pd.DataFrame) -> pd.Series[float]:
    """Of each completion the outcome of its own domain; the others' are missing."""
    columns = [component for component in scores if _short(component) in OUTCOMES]
    return scores[columns].bfill(axis=1).iloc[:, 0]


def _short(component: str) -> str:
    """``accuracy`` of ``chain_sum.accuracy``."""
    return component.rpartition(".")[2]
