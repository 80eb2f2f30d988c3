"""What a sweep file means, and what is refused in one: no run is started here."""

from __future__ import annotations

from importlib import import_module

import pytest

RATE = "model.init_args.optimizer.learning_rate"
PLANS = "trainer.callbacks.AdaptiveLoRA.policy.plans"


def cells_of(path):
    return import_module("sweeping.cells").cells_of(
        import_module("sweeping.specification").load(path)
    )


def arm(**more):
    return {"config": "tiny.yaml", **more}


def test_cells_come_seed_by_seed_and_after_the_arms_that_they_need(write_sweep):
    path = write_sweep(
        seeds=[3, 1],
        grid={RATE: [0.001, 1e-05]},
        arms={
            "replay": arm(overrides={PLANS: "{run:source}"}),
            "source": arm(),
            "short": arm(seeds=[1, 7], grid={RATE: [0.5]}),
        },
    )
    assert list(cells_of(path)) == [
        "source/learning_rate=0.001,seed=3",
        "source/learning_rate=1e-05,seed=3",
        "replay/learning_rate=0.001,seed=3",
        "replay/learning_rate=1e-05,seed=3",
        "source/learning_rate=0.001,seed=1",
        "source/learning_rate=1e-05,seed=1",
        "replay/learning_rate=0.001,seed=1",
        "replay/learning_rate=1e-05,seed=1",
        "short/learning_rate=0.5,seed=1",
        "short/learning_rate=0.5,seed=7",
    ]


def test_references_name_the_run_of_the_same_grid_point(write_sweep):
    path = write_sweep(
        seeds=[4, 5, 6],
        arms={
            "source": arm(grid={RATE: [0.1, 0.2]}),
            "replay": arm(
                overrides={PLANS: "{run:source:other_seed}", "data.x": ["{seed}", "s{other_seed}"]},
                grid={RATE: [0.1, 0.2], "a.mode": ["final", "schedule"]},
            ),
        },
    )
    cell = cells_of(path)["replay/learning_rate=0.2,mode=final,seed=6"]
    assert cell.refers == {"run:source:other_seed": "source/learning_rate=0.2,seed=4"}
    settings = cell.settings(lambda key: f"runs/{key}")
    assert settings[PLANS] == "runs/source/learning_rate=0.2,seed=4"
    assert settings["data.x"] == [6, "s4"]  # alone it stays a number
    assert settings[RATE] == 0.2


def test_arm_that_only_needs_another_waits_for_all_its_cells(write_sweep):
    arms = {"first": arm(grid={RATE: [1, 2]}), "second": arm(needs="first", seeds=[0])}
    cell = cells_of(write_sweep(arms=arms))["second/seed=0"]
    assert set(cell.after) == {f"first/learning_rate={r},seed={s}" for r in (1, 2) for s in (0, 1)}


def test_arms_win_over_common_settings_and_lists_are_joined(write_sweep):
    path = write_sweep(
        seeds=[0],
        overrides={RATE: 0.1, "trainer.callbacks+": [{"class_path": "a.A"}]},
        arms={
            "plain": arm(),
            "own": arm(overrides={RATE: 0.2, "trainer.callbacks+": {"class_path": "b.B"}}),
            "grid": arm(grid={RATE: [0.3]}),
        },
    )
    plain, own, grid = (cell.settings(str) for cell in cells_of(path).values())
    assert (plain[RATE], own[RATE], grid[RATE]) == (0.1, 0.2, 0.3)
    assert [item["class_path"] for item in own["trainer.callbacks+"]] == ["a.A", "b.B"]
    assert [item["class_path"] for item in plain["trainer.callbacks+"]] == ["a.A"]


def test_short_names_are_endings_that_no_other_setting_or_column_has():
    short_names = import_module("sweeping.cells").short_names
    every = [
        f"trainer.callbacks.{c}.init_args.every_n_rollouts" for c in ("Pressure", "Checkpoint")
    ]
    assert short_names([RATE, *every, "data.init_args.seed"]) == {
        RATE: "learning_rate",
        every[0]: "Pressure.every_n_rollouts",
        every[1]: "Checkpoint.every_n_rollouts",
        "data.init_args.seed": "data.seed",
    }


def test_names_of_grid_values_can_be_folders_and_differ(write_sweep):
    values = ["a/b", "a_b", True, None, {"class_path": "x.Uniform"}, {"class_path": "y.Uniform"}]
    path = write_sweep(seeds=[0], arms={"one": arm(grid={"model.policy": values})})
    names = [cell.name for cell in cells_of(path).values()]
    assert len(set(names)) == len(values)
    assert names[1:4] == ["policy=a_b,seed=0", "policy=true,seed=0", "policy=null,seed=0"]
    assert names[4].startswith("policy=Uniform-")
    assert not any("/" in name for name in names)


def test_numbers_are_read_as_the_cli_reads_them(write_sweep):
    path = write_sweep(seeds=[0], arms={"one": arm(grid={RATE: ["FIRST", "SECOND"]})})
    path.write_text(path.read_text().replace("FIRST", "1e-3").replace("SECOND", "2E+1"))
    assert [cell.grid[RATE] for cell in cells_of(path).values()] == [0.001, 20.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"arm": {}, "arms": {"a": arm()}}, "unknown key 'arm'"),
        ({"arms": {"a": arm(override={})}}, "arm 'a': unknown key 'override'"),
        ({"arms": None}, "has no 'arms'"),
        ({"question": None, "arms": {"a": arm()}}, "has no 'question'"),
        ({"name": "a/b", "arms": {"a": arm()}}, "'a/b' names a folder"),
        ({"arms": {False: arm()}}, "arm False: an arm names a folder"),
        ({"arms": {"a": {"config": "gone.yaml"}}}, "arm 'a': config 'gone.yaml' is neither"),
        ({"seeds": None, "arms": {"a": arm()}}, "arm 'a': seeds=None"),
        ({"seeds": [1, 1], "arms": {"a": arm()}}, r"seeds=\[1, 1\]"),
        ({"arms": {"a": arm(needs="b")}}, "arm 'a' needs arm 'b', which the file has not"),
        ({"arms": {"a": arm(overrides={"x": "{run:c}"})}}, "needs arm 'c'"),
        ({"arms": {"a": arm(overrides={"x": "{run:a:seed}"})}}, "{run:a:seed} is no reference"),
        (
            {"arms": {"a": arm(needs="b"), "b": arm(overrides={"x": "{run:a}"}), "c": arm()}},
            "arms a, b need each other in a circle",
        ),
        ({"arms": {"a": arm(grid={RATE: 0.1})}}, "give a list of values"),
        ({"arms": {"a": arm(grid={RATE: [1]}, overrides={RATE: 1})}}, "in overrides and in grid"),
        ({"arms": {"a": arm(overrides={"seed_everything": 1})}}, "set by the sweep itself"),
        ({"arms": {"a": arm(overrides={"trainer.logger.name": 1})}}, "set by the sweep itself"),
        ({"arms": {"a": arm(grid={RATE: [1, 1]})}}, "is there twice"),
        ({"seeds": [0], "arms": {"a": arm(overrides={"x": "{other_seed}"})}}, "no other_seed"),
        (
            {"arms": {"a": arm(seeds=[0]), "b": arm(overrides={"x": "{run:a}"})}},
            "names seed 1, which arm 'a' has not",
        ),
        (
            {"arms": {"a": arm(grid={RATE: [1]}), "b": arm(overrides={"x": "{run:a}"})}},
            f"arm 'a' has {RATE} in its grid",
        ),
        ({"arms": {"a": arm()}, "collect": "a.py:b"}, "no 'results'"),
    ],
)
def test_what_is_wrong_is_refused_by_name(write_sweep, content, message):
    path = write_sweep(**content)
    with pytest.raises(ValueError, match=message) as refusal:
        cells_of(path)
    assert str(path) in str(refusal.value)


def test_an_arm_given_twice_is_refused(write_sweep):
    path = write_sweep(arms={"a": arm()})
    path.write_text(path.read_text() + "  a:\n    config: tiny.yaml\n")
    with pytest.raises(ValueError, match="key 'a' is there twice"):
        cells_of(path)
