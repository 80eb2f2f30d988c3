"""The study's comparisons on a table made by hand, and that its sweep uses the rates it names."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from experiments.study import contrasts, report
from paper_figures import arms, study

STUDY = Path(__file__).resolve().parents[2] / "experiments" / "study"


def run(stage: str, arm: str, rate: float, seed: int, held_out: list[float], kl: list[float],
        seconds: float = 10.0) -> list[dict[str, object]]:  # fmt: skip
    """Evaluations at rollouts 0, 20, 40, 60."""
    return [
        {
            "stage": stage,
            "twin": "organism",
            "arm": arm,
            "learning_rate": rate,
            "group_size": 8,
            "seed": seed,
            "config_hash": "h",
            "rollout": 20 * t,
            "held_out": value,
            "held_out_n": 100,
            "other": 0.9 - 0.01 * t,
            "other_n": 100,
            "kl_in": kl[t],
            "kl_out": kl[t],
            "seconds": seconds * t,
            "tokens": 100 * t,
            "reward": 1.0,
            "trainable_params": 10.0,
            "trainable_params_mean": 10.0,
            "noise_scale": 5.0,
            "decisions_applied": t,
            "run": f"{arm}{rate}{seed}",
            "other_drop": 0.01 * t,
        }
        for t, value in enumerate(held_out)
    ]


@pytest.fixture
def results() -> pd.DataFrame:
    """Uniform goes from 0.6 to 0.8 at 1e-3, so L is 0.75; at 5e-4 it reaches 0.76 with less KL."""
    rows: list[dict[str, object]] = []
    for seed in (100, 101):
        for arm in ("uniform", "signal_shrink"):
            rows += run("choose", arm, 1e-3, seed, [0.6, 0.7, 0.8, 0.8], [0, 0.1, 0.3, 0.6])
            rows += run("choose", arm, 5e-4, seed, [0.6, 0.66, 0.72, 0.76], [0, 0.01, 0.03, 0.07])
        # a rate that other arms did not run at counts for nothing
        rows += run("choose", "uniform", 2e-3, seed, [0.6, 0.9, 0.9, 0.9], [0, 0.0, 0.0, 0.0])
    for seed in range(4):
        for rate in (1e-3, 5e-4):
            rows += run("main", "uniform", rate, seed, [0.6, 0.7, 0.8, 0.8], [0, 0.1, 0.2, 0.4])
            better = 0.01 * (seed + 1)
            held_out = [0.6, 0.7 + better, 0.8 + better, 0.8]
            rows += run("main", "signal_shrink", rate, seed, held_out, [0, 0.1, 0.1, 0.4], 20.0)
    return pd.DataFrame(rows)


def test_rates_and_level(results: pd.DataFrame) -> None:
    level, rates = contrasts.chosen_rates(results)
    assert level == pytest.approx(0.6 + 0.75 * 0.2)
    # at L: 1e-3 has 0.2 (half way from 0.1 to 0.3), 5e-4 0.03 + 0.75 * 0.04
    assert rates == {"uniform": (1e-3, 5e-4), "signal_shrink": (1e-3, 5e-4)}


def test_a_rate_at_which_a_seed_never_reaches_the_level_is_not_chosen_for_its_kl(
    results: pd.DataFrame,
) -> None:
    is_short = (results["learning_rate"] == 5e-4) & (results["seed"] == 101)
    results.loc[is_short & (results["arm"] == "signal_shrink"), "held_out"] = 0.7
    _, rates = contrasts.chosen_rates(results)
    assert rates == {"uniform": (1e-3, 5e-4), "signal_shrink": (1e-3, 1e-3)}


def test_primary_contrasts(results: pd.DataFrame) -> None:
    found = contrasts.primary(results)
    assert found[["endpoint", "arm", "control"]].to_numpy().tolist() == [
        ["A", "signal_shrink", "uniform"],
        ["B", "signal_shrink", "uniform"],
    ]
    kl, seconds = found.to_dict("records")
    # uniform reaches 0.75 half way between KL 0.1 and 0.2; the other arm has 0.1 all along
    assert kl["difference"] == pytest.approx(math.log(0.1 / 0.15))
    # uniform is at rollout 40 after 20 seconds, where the arm is at rollout 20
    assert seconds["control_value"] == pytest.approx(0.8)
    assert seconds["arm_value"] == pytest.approx(0.7 + 0.025)
    assert kl["n"] == seconds["n"] == 4
    assert kl["p"] == seconds["p"] == pytest.approx(2 / 16)
    assert kl["corrected"] == pytest.approx(2 * 2 / 16)


def test_half_way_takes_the_place_of_a_level_that_a_seed_never_reaches(
    results: pd.DataFrame,
) -> None:
    is_short = (results["stage"] == "main") & (results["arm"] == "uniform") & (results["seed"] == 3)
    results.loc[is_short & (results["rollout"] >= 40), "held_out"] = 0.74
    kl = contrasts.primary(results).iloc[0]
    assert kl["level"] == pytest.approx(0.7)  # half of the way from 0.6 to 0.8
    assert kl["n"] == 4
    # uniform has KL 0.1 at 0.7; the arm reaches it on its way to 0.7 + 0.01 (seed + 1)
    expected = [math.log(0.1 * 0.1 / (0.1 + 0.01 * (seed + 1))) for seed in range(4)]
    assert kl["arm_value"] == pytest.approx(sum(expected) / 4)
    assert kl["control_value"] == pytest.approx(math.log(0.1))


def test_a_run_that_is_over_counts_with_its_end() -> None:
    short = pd.DataFrame(run("main", "a", 1e-3, 0, [0.6, 0.7, 0.8, 0.9], [0, 0, 0, 0]))
    assert contrasts.after_seconds(short, 99.0).tolist() == [0.9]
    assert contrasts.after_seconds(short, 15.0).tolist() == [pytest.approx(0.75)]


def test_holm_on_a_worked_example() -> None:
    # sorted 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5: made monotone
    corrected = contrasts.holm([0.03, 0.01, 0.5, 0.02])
    assert corrected == pytest.approx([0.06, 0.04, 0.5, 0.06])


def test_page_names_stages_that_have_not_run(results: pd.DataFrame) -> None:
    page = report.report(results)
    assert "Stages not run: planted, groups, rewards, controls, gain, oracle." in page
    assert "| log KL at 0.750 | signal_shrink | uniform | -2.303 |" in page
    # all along at KL 0.1; half way between the evaluations at rollouts 0 and 20 nothing is lost yet
    assert "| signal_shrink | 0.0005 | 0.1000 | 0.1000 | +0.0" in page


def test_the_main_sweep_runs_at_the_rates_that_the_first_stage_gave() -> None:
    if not (STUDY / "main.yaml").is_file():
        pytest.skip("the first stage is not finished")
    _, rates = contrasts.chosen_rates(arms.read_results(STUDY / "results"))
    sweep = yaml.safe_load((STUDY / "main.yaml").read_text(encoding="utf-8"))["arms"]
    listed = {
        arm: {float(rate) for rate in entry["grid"]["model.init_args.optimizer.learning_rate"]}
        for arm, entry in sweep.items()
    }
    assert listed == {arm: set(rates[arm]) for arm in listed}
    needed = {arm for pair in contrasts.CONTRASTS for arm in pair}
    assert needed <= listed.keys()


def test_the_committed_page_is_that_of_the_committed_tables() -> None:
    page = STUDY / "results.md"
    if not page.is_file():
        pytest.skip("no stage has run")
    assert page.read_text(encoding="utf-8") == report.report(arms.read_results(STUDY / "results"))


def test_the_readme_says_what_the_tables_say() -> None:
    results = arms.read_results(STUDY / "results")
    readme = (STUDY.parents[1] / "README.md").read_text(encoding="utf-8")
    said = re.search(r"with (\d+) % more KL \(95 % (\d+) to (\d+) %\)", readme)
    assert said is not None
    first = contrasts.primary(results).iloc[0]
    assert (first["arm"], first["control"], first["endpoint"]) == ("signal_shrink", "uniform", "A")
    found = [100 * math.expm1(first[name]) for name in ("difference", "low", "high")]
    assert [int(number) for number in said.groups()] == [round(number) for number in found]
    num = re.search(r"`experiments/study/`, (\d+) runs", readme)
    assert num is not None
    assert int(num[1]) == len(results[study.CELL].drop_duplicates())
