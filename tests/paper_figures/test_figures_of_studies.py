"""Figures whose data do not exist yet, on made-up tables of the agreed columns."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from paper_figures import arms, style
from paper_figures.sources import MissingDataError

PLACEMENT = ("uniform", *arms.MEASURED, *arms.CONTROLS)
EVALUATIONS = tuple(range(0, 101, 20))
Drawn = tuple[pd.DataFrame, list[str]]
STUDY_FIGURES = ("arms", "forgetting", "wall_time", "group_size")


def cell(stage: str, twin: str, arm: str, rate: float, seed: int, size: int = 8) -> pd.DataFrame:
    """One run: held-out pass grows with the rate, KL with rate and time."""
    rng = np.random.default_rng([seed, size, round(rate * 1e5), len(arm)])
    t = np.array(EVALUATIONS) / 100
    held_out = 0.5 + 0.3 * (1 - np.exp(-t * rate * 8e3)) + rng.normal(0, 0.005, len(t)) * (t > 0)
    return pd.DataFrame(
        {
            "stage": stage, "twin": twin, "arm": arm, "learning_rate": rate, "group_size": size,
            "seed": seed, "config_hash": "c0ffee", "rollout": EVALUATIONS, "held_out": held_out,
            "held_out_n": 512, "other": 0.8 - 0.05 * t, "other_n": 256, "kl_in": rate * 200 * t,
            "kl_out": rate * 90 * t, "seconds": 300 * t * (0.7 if arm == "depth" else 1.0),
            "tokens": 40_000 * t, "reward": held_out, "trainable_params": 1000,
            "trainable_params_mean": 350 if arm == "static_top" else 1000, "noise_scale": np.nan,
            "decisions_applied": 0, "run": f"study/{stage}_{arm}_{rate}_{size}_{seed}",
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cells = [
        *(
            cell("choose", "organism", arm, rate, seed)
            for arm in PLACEMENT
            for rate in (5e-4, 1e-3)
            for seed in (100, 101)
        ),
        *(
            cell("main", "organism", arm, rate, seed)
            for arm in PLACEMENT
            for rate in (5e-4, 1e-3)
            for seed in range(2 if arm == "rotate" else 3)
        ),
        *(cell("planted", "planted", arm, 1e-3, seed) for arm in PLACEMENT for seed in range(3)),
        *(cell("rewards", "organism", arm, 1e-3, s) for arm in ("fixed", "saw") for s in range(3)),
        *(cell("groups", "organism", "uniform", 1e-3, s, 2**g) for g in (1, 3, 5) for s in (0, 1)),
    ]
    path = tmp_path_factory.mktemp("study") / "results.csv"
    pd.concat(cells).to_csv(path, index=False)
    return path


def draw(name: str, source: Path, folder: Path) -> Drawn:
    """Collects, draws and saves; the CSV and every text in the figure."""
    module = import_module(f"paper_figures.fig_{name}")
    csv = folder / f"{name}.csv"
    module.collect(source).to_csv(csv, index=False)
    drawn = []
    style.redraw(lambda path: drawn.append(module.make(path)) or drawn[0], csv, folder / name)
    return pd.read_csv(csv), [text.get_text() for text in drawn[0].findobj(Text)]


@pytest.fixture(scope="module")
def figures(table: Path) -> dict[str, Drawn]:
    """All of them, drawn once, beside the table."""
    return {name: draw(name, table, table.parent) for name in STUDY_FIGURES}


def test_they_are_drawn_and_name_their_runs(figures: dict[str, Drawn], table: Path):
    for name, (data, _) in figures.items():
        assert (table.parent / f"{name}.png").stat().st_size > 10_000
        assert data["run"].notna().any(), name
        assert data["run"].dropna().str.startswith("study/").all(), name


def test_arms_with_fewer_seeds_are_called_unfinished(figures: dict[str, Drawn]):
    for name in ("arms", "forgetting", "wall_time"):
        text = " ".join(figures[name][1])
        assert "rotate (unfinished, 2 of 3)" in text, name
        assert "depth (unfinished" not in text, name


def test_arms_are_compared_with_the_baseline_of_their_stage(figures: dict[str, Drawn]):
    data, _ = figures["arms"]
    assert dict(data.groupby("stage")["baseline"].first()) == {
        "main": "uniform", "planted": "uniform", "rewards": "fixed"
    }  # fmt: skip
    own = data[(data["arm"] == "static_top") & (data["stage"] == "main")]
    assert set(own["trainable"]) == {0.35}
    values = own[own["measure"] == "held_out"].groupby("kind")["value"].agg(list)
    assert len(values["seed"]) == 3
    assert values["mean"][0] == pytest.approx(np.mean(values["seed"]))


def test_frontiers_take_the_rate_that_moves_least(figures: dict[str, Drawn]):
    data, _ = figures["forgetting"]
    own = data[(data["arm"] == "uniform") & (data["measure"] == "kl_in")]
    rates = own[own["kind"] == "rate"].groupby("level")["value"].min()
    frontier = own[own["kind"] == "frontier"].set_index("level")["value"]
    np.testing.assert_allclose(frontier, rates[frontier.index])


def test_a_cheaper_step_reaches_the_same_reward_sooner(figures: dict[str, Drawn]):
    data, _ = figures["wall_time"]
    ends = data[data["block"] == "organism"].groupby("arm")["seconds"].max()
    assert ends["depth"] < 0.75 * ends["uniform"]


def test_group_sizes_that_never_reach_the_level_have_no_mean(table: Path, tmp_path: Path):
    rows = pd.read_csv(table)
    slow = (rows["group_size"] == 2) & (rows["stage"] == "groups") & (rows["seed"] == 0)
    rows.loc[slow, "held_out"] = 0.5
    rows.to_csv(tmp_path / "slow.csv", index=False)
    data, texts = draw("group_size", tmp_path / "slow.csv", tmp_path)
    means = data[data["kind"] == "mean"].groupby("measure")["group_size"].agg(set)
    assert means["tokens_to_level"] == {8, 32}
    assert means["final"] == {2, 8, 32}
    assert "1 of 2 never" in texts


def test_growth(tmp_path: Path):
    growth = import_module("paper_figures.fig_growth")
    base = {**growth.BASE, "num_prompts": 2, "max_new_tokens": 96}
    points = [base, *({**base, "group_size": g} for g in (4, 16)), {**base, "prompt_tokens": 512}]
    points += [{**base, "model": "gemma-3-270m"}, {**base, "layers": "top_third"}, base]
    measured = [
        {"tropism_step_s": 6.0 + i, "trl_step_s": 18.0 + i, "tropism_mb": 1500, "trl_mb": 2600,
         "steps": 2, "commit": "abc1234", "date": "2026-12-03T00:00:00"}
        for i in range(len(points))
    ]  # fmt: skip
    source = tmp_path / "growth.csv"
    rows = [{**point, **found} for point, found in zip(points, measured, strict=True)]
    pd.DataFrame(rows).to_csv(source, index=False)
    data, texts = draw("growth", source, tmp_path)
    sizes = data[data["curve"] == "group_size"].set_index("value")["tropism_step_s"]
    assert dict(sizes) == {"4": 7.0, "16": 8.0, "8": 12.0}  # the latest of the shared point
    assert {"262k", "top third", "512"} <= set(texts)


@pytest.mark.parametrize("name", [*STUDY_FIGURES, "growth"])
def test_missing_data_name_the_command(name: str, tmp_path: Path):
    with pytest.raises(MissingDataError, match=r"is not there yet: `make (study|bench-growth)`"):
        import_module(f"paper_figures.fig_{name}").collect(tmp_path / "none.csv")


def test_a_folder_has_a_table_for_each_stage(table: Path, tmp_path: Path):
    rows = pd.read_csv(table)
    folder = tmp_path / "results"
    folder.mkdir()
    written = rows.drop(columns=["stage", "run"]).rename(columns={"config_hash": "hash"})
    for stage, own in written.assign(commit="bf4fa58ada").groupby(rows["stage"]):
        own.to_csv(folder / f"{stage}.csv", index=False)
    found, expected = arms.read_results(folder), arms.read_results(table)
    pd.testing.assert_frame_equal(
        found[list(arms.COLUMNS)].drop(columns="run"),
        expected[list(arms.COLUMNS)].drop(columns="run"),
    )
    assert set(found["run"].str.split("/").str[0]) == set(rows["stage"])
    assert found["run"].str.endswith("/c0ffee@bf4fa58").all()


def test_frontiers_without_several_rates_are_those_of_the_choosing_stage(
    table: Path, tmp_path: Path
):
    rows = pd.read_csv(table)
    rows = rows[(rows["stage"] != "main") | (rows["learning_rate"] == 1e-3)]
    only_uniform = rows[(rows["arm"] == "uniform") & (rows["stage"] == "choose")]
    more = only_uniform.assign(learning_rate=only_uniform["learning_rate"] / 16)
    pd.concat([rows, more]).to_csv(tmp_path / "one.csv", index=False)
    module = import_module("paper_figures.fig_forgetting")
    found = module.collect(tmp_path / "one.csv")
    assert set(found[found["kind"] == "run"]["stage"]) == {"choose"}
    assert set(found["learning_rate"].dropna()) == {5e-4, 1e-3}  # not those of uniform alone
    only_uniform.to_csv(tmp_path / "alone.csv", index=False)
    with pytest.raises(MissingDataError, match="one arm alone"):
        module.collect(tmp_path / "alone.csv")
    rows[(rows["stage"] == "choose") & (rows["seed"] == 100)].to_csv(
        tmp_path / "s.csv", index=False
    )
    with pytest.raises(MissingDataError, match="one seed alone"):
        module.collect(tmp_path / "s.csv")


def test_the_table_is_checked(table: Path, tmp_path: Path):
    rows = pd.read_csv(table)
    rows.drop(columns="kl_in").to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(ValueError, match=r"lacks the columns \['kl_in'\]"):
        arms.read_results(tmp_path / "short.csv")
    pd.concat([rows, rows[:1]]).to_csv(tmp_path / "twice.csv", index=False)
    with pytest.raises(ValueError, match="1 evaluations twice"):
        arms.read_results(tmp_path / "twice.csv")
