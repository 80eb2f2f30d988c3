"""Interpolation at equal reward and at equal seconds, frontiers, intervals: by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from paper_figures import intervals, study
from paper_figures.intervals import difference_interval, mean_interval
from scipy import stats


def run(arm: str, seed: int, held_out: list[float], kl: list[float], **more) -> pd.DataFrame:
    cell = {"stage": "main", "twin": "organism", "arm": arm, "learning_rate": 1e-3,
            "group_size": 8, "seed": seed, "held_out_n": 100}  # fmt: skip
    time = range(len(held_out))
    seconds = [10.0 * t for t in time]
    columns = {"rollout": time, "held_out": held_out, "kl": kl, "seconds": seconds}
    return pd.DataFrame({**cell, **columns, **more})


# -- single runs ------------------------------------------------------------------------------


def test_at_level_takes_the_first_crossing():
    held_out = [0.2, 0.4, 0.3, 0.6]
    kl = [0.0, 1.0, 5.0, 8.0]
    found = study.at_level(held_out, kl, [0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
    # 0.3 lies halfway to the first evaluation, not at the third; 0.5 two thirds from 0.3 to 0.6.
    np.testing.assert_allclose(found, [0.0, 0.0, 0.5, 1.0, 7.0, np.nan])


def test_at_level_does_not_depend_on_what_follows():
    levels = [0.25, 0.4]
    one = study.at_level([0.2, 0.5], [0.0, 3.0], levels)
    np.testing.assert_array_equal(
        one, study.at_level([0.2, 0.5, 0.1, 0.9], [0.0, 3.0, 9.0, 9.0], levels)
    )
    np.testing.assert_allclose(one, [0.5, 2.0])


def test_at_position_extrapolates_nothing():
    found = study.at_position([0, 10, 30], [0.0, 1.0, 2.0], [-1, 0, 5, 20, 30, 31])
    np.testing.assert_allclose(found, [np.nan, 0.0, 0.5, 1.5, 2.0, np.nan])
    with pytest.raises(ValueError, match="do not ascend"):
        study.at_position([0, 5, 4], [0, 0, 0], [1])


# -- intervals --------------------------------------------------------------------------------


def test_interval_of_one_seed_without_prompts_is_a_point():
    assert mean_interval([0.25]) == (0.25, 0.25, 0.25, 1)


def test_interval_over_seeds_is_the_bootstrap_of_scipy():
    values = np.array([0.1, 0.5, 0.4, 0.8, 0.3, 0.9, 0.2])
    reference = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    found = mean_interval(values)
    assert found.value == pytest.approx(values.mean())
    assert found.n == 7
    assert found.low == pytest.approx(reference.low, abs=0.02)
    assert found.high == pytest.approx(reference.high, abs=0.02)


def test_prompts_within_seeds_widen_it_as_the_binomial_says():
    # Seeds that agree: only prompts vary, so the mean over 4 x 100 has sd sqrt(.25 / 400).
    found = mean_interval([0.5] * 4, [100] * 4)
    assert found.high - found.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 400), rel=0.08)
    assert mean_interval([0.5] * 4)[1:3] == (0.5, 0.5)
    # Rates of 0 and 1 leave prompts nothing to vary.
    assert mean_interval([1.0] * 3, [100] * 3)[:3] == (1.0, 1.0, 1.0)


def test_differences_are_paired_by_seed():
    baseline = np.array([0.1, 0.5, 0.9])
    found = difference_interval(baseline + 0.05, baseline)
    np.testing.assert_allclose(found[:3], 0.05)
    assert found.n == 3
    unpaired = difference_interval(baseline[::-1] + 0.05, baseline)
    assert unpaired.high - unpaired.low > 0.5
    with pytest.raises(ValueError, match="they are no pairs"):
        difference_interval([0.1, 0.2], [0.1])


def test_both_sides_of_a_difference_draw_their_own_prompts():
    found = difference_interval([0.5] * 4, [0.5] * 4, [100] * 4, [100] * 4)
    assert found.high - found.low == pytest.approx(2 * 1.96 * np.sqrt(2 * 0.25 / 400), rel=0.08)


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="no seeds"):
        mean_interval([])


# -- tables -----------------------------------------------------------------------------------


def test_a_level_counts_only_where_all_seeds_reach_it():
    rows = pd.concat([run("a", 0, [0.2, 0.6], [0, 4]), run("a", 1, [0.2, 0.4], [0, 1])])
    found = study.at_equal_reward(rows, "kl", [0.3, 0.4, 0.5]).set_index("level")
    assert list(found.index) == [0.3, 0.4]
    # 0.3: a quarter of the way of one, half of the other: (1 + 0.5) / 2.
    assert found["value"].tolist() == pytest.approx([0.75, 1.5])
    assert set(found["n"]) == {2}


def test_frontier_changes_its_rate_where_lines_cross():
    slow = [run("a", s, [0.0, 1.0], [0, 2 + s], learning_rate=1e-3) for s in (0, 1)]
    fast = [run("a", s, [0.0, 0.2, 1.0], [0, 0, 10], learning_rate=2e-3) for s in (0, 1)]
    found = study.frontiers(pd.concat([*slow, *fast]), "kl", [0.2, 0.6, 1.0])
    assert found["learning_rate"].tolist() == [2e-3, 1e-3, 1e-3]
    assert found["value"].tolist() == pytest.approx([0.0, 1.5, 2.5])
    # Of two seeds a resample has either one twice, or both.
    assert found[["low", "high"]].to_numpy()[2] == pytest.approx([2.0, 3.0])


def test_frontier_leaves_out_rates_with_fewer_seeds():
    cells = [run("a", s, [0.0, 1.0], [0, 2]) for s in (0, 1)]
    cells.append(run("a", 0, [0.0, 1.0], [0, 1], learning_rate=2e-3))
    found = study.frontiers(pd.concat(cells), "kl", [0.5])
    assert found["value"].tolist() == [1.0]
    assert found["n"].tolist() == [2]


def test_curves_end_with_the_quickest_seed():
    rows = pd.concat([run("a", 0, [0.2, 0.4, 0.6], [0] * 3), run("a", 1, [0.4, 0.6], [0] * 2)])
    found = study.curves(rows, "held_out", "seconds", [0, 5, 10, 15])
    assert found["seconds"].tolist() == [0, 5, 10]
    assert found["value"].tolist() == pytest.approx([0.3, 0.4, 0.5])
    assert (found["low"] < found["value"]).all()


def test_contrasts_use_the_seeds_that_both_ran():
    ends = study.last(
        pd.concat([run(*cell, [0, 0]) for cell in (("a", 0, [0.1, 0.5]), ("a", 1, [0.1, 0.7]),
                                                   ("u", 0, [0.1, 0.4]), ("u", 2, [0.1, 0.9]))])
    )  # fmt: skip
    found = study.contrasts(ends, "held_out", ends[ends["arm"] == "u"]).set_index("arm")
    assert found.loc["a", "value"] == pytest.approx(0.1)
    assert found.loc["a", "n"] == 1
    assert found.loc["u", "value"] == 0


def test_one_rate_is_chosen_on_the_choosing_stage_alone():
    choose = [
        run("a", 9, [0.1, end], [0, 0], learning_rate=rate, stage="choose")
        for rate, end in ((1e-3, 0.5), (2e-3, 0.6))
    ]
    main = pd.concat(
        [run("a", 0, [0.1, 0.9], [0, 0]), run("a", 0, [0.1, 0.3], [0, 0], learning_rate=2e-3)]
    )
    kept = study.one_rate(main, pd.concat([*choose, main]))
    assert set(kept["learning_rate"]) == {2e-3}  # though the other did better in the study itself
    assert len(study.one_rate(main[:2], main)) == 2  # one rate needs no choice


def test_where_nothing_was_chosen_before_each_seed_runs_at_the_rate_best_for_the_others():
    ends = {0: (0.9, 0.3), 1: (0.4, 0.5), 2: (0.4, 0.5)}  # seed: at 1e-3, at 2e-3
    rows = pd.concat(
        run("a", seed, [0.1, end], [0, 0], learning_rate=rate)
        for seed, pair in ends.items()
        for rate, end in zip((1e-3, 2e-3), pair, strict=True)
    )
    kept = study.last(study.one_rate(rows, rows))
    # for seed 0 the others say 2e-3; for 1 and 2 seed 0 outweighs the other
    assert dict(zip(kept["seed"], kept["held_out"], strict=True)) == {0: 0.3, 1: 0.4, 2: 0.4}


def test_each_seed_runs_at_the_rate_that_is_best_for_the_others():
    ends = {1e-3: (0.5, 0.9, 0.5), 2e-3: (0.6, 0.6, 0.6)}  # by seed
    cells = [
        run("a", seed, [0.1, end], [0, 0], learning_rate=rate)
        for rate, by_seed in ends.items()
        for seed, end in enumerate(by_seed)
    ]
    kept = study.last(study.cross_chosen(pd.concat(cells), "group_size")).set_index("seed")
    # without seed 1 the second rate is better; with it (for the others) the first
    assert kept["learning_rate"].to_dict() == {0: 1e-3, 1: 2e-3, 2: 1e-3}


def test_unfinished_arms():
    rows = pd.DataFrame({"arm": ["a", "a", "b"], "seed": [0, 1, 0]})
    assert study.unfinished(rows) == {"b": "unfinished, 1 of 2"}


def test_intervals_are_the_same_at_every_call():
    assert mean_interval([0.1, 0.4, 0.3], [50] * 3) == mean_interval([0.1, 0.4, 0.3], [50] * 3)
    assert intervals.seed_draws(3).shape == (intervals.NUM_RESAMPLES, 3)
