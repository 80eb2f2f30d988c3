"""What the command is asked for, what it refuses, and when two cells are the same."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import yaml

RATE = "model.init_args.optimizer.learning_rate"
ADAPTIVE = {
    "class_path": "tropism_callbacks.AdaptiveLoRA",
    "init_args": {
        "policy": {
            "class_path": "tropism.adaptation.placement.Replay",
            "init_args": {"plans": "nowhere", "mode": "final"},
        }
    },
}


def hashes(path) -> dict[str, str]:
    state = import_module("sweeping").open_sweep(path)
    return {key: identity.hash for key, identity in state.identities.items()}


def one(**arm):
    return {"arms": {"a": {"config": "tiny.yaml", **arm}}}


def test_overlay_finds_callbacks_by_class_in_settings_config_and_defaults(write_sweep):
    config = write_sweep(**one()).parent / "tiny.yaml"
    overlay = import_module("sweeping.settings").overlay
    given = {
        "trainer.callbacks.AdaptiveLoRA.policy.plans": "runs/x",
        "trainer.callbacks.AdaptiveLoRA.every_n_rollouts": 3,
        "trainer.callbacks.Pressure.num_prompts": 4,
        "trainer.callbacks.Checkpoint.init_args.keep": 5,
        "trainer.callbacks+": [ADAPTIVE],
        "trainer.max_steps": 7,
    }
    trainer = overlay(config, given)["trainer"]
    assert trainer["max_steps"] == 7
    adaptive, pressure, checkpoint = trainer["callbacks+"]
    assert adaptive["init_args"]["policy"]["init_args"] == {"plans": "runs/x", "mode": "final"}
    assert adaptive["init_args"]["every_n_rollouts"] == 3
    assert pressure["init_args"] == {"every_n_rollouts": 2, "num_prompts": 4}
    assert checkpoint == {"class_path": "tropism_callbacks.Checkpoint", "init_args": {"keep": 5}}
    nowhere = ADAPTIVE["init_args"]["policy"]["init_args"]["plans"]
    assert nowhere == "nowhere", "the sweep's own settings stay as they are, for the next cell"


def test_hash_is_of_the_complete_settings_however_they_are_written(write_sweep):
    plain = hashes(write_sweep(**one()))
    assert len(set(plain.values())) == 2  # the seed is a setting
    same = {RATE: 2e-3, "trainer.callbacks.Checkpoint.keep": 2}  # tiny.yaml's, and the default
    assert hashes(write_sweep(**one(overrides=same))) == plain
    assert hashes(write_sweep(seeds=[1, 0, 5], **one())).items() > plain.items()
    for changed in ({RATE: 1e-3}, {"trainer.callbacks.Checkpoint.keep": 3}):
        assert not set(hashes(write_sweep(**one(overrides=changed))).values()) & {*plain.values()}


def test_overrides_from_a_file_beside_the_sweep(write_sweep):
    plain = hashes(write_sweep(**one(overrides={RATE: 1e-3, "trainer.max_steps": 7})))
    path = write_sweep(**one(overrides=["common.yaml", {"trainer.max_steps": 7}]))
    (path.parent / "common.yaml").write_text(f"{RATE}: 1e-3\ntrainer.max_steps: 5\n")
    assert hashes(path) == plain
    with pytest.raises(ValueError, match=r"arm 'a': overrides 'absent\.yaml': there is no .*study"):
        hashes(write_sweep(**one(overrides="absent.yaml")))


def test_hash_follows_the_run_that_is_named_but_not_its_folder(write_sweep):
    def sweep(rate: float, **more):
        replay = {
            "config": "tiny.yaml",
            "overrides": {
                "trainer.callbacks+": [ADAPTIVE],
                "trainer.callbacks.AdaptiveLoRA.policy.plans": "{run:source:other_seed}",
            },
        }
        source = {"config": "tiny.yaml", "overrides": {RATE: rate}}
        path = write_sweep(arms={"replay": replay, "source": source, **more})
        return hashes(path)

    before, changed = sweep(1e-3), sweep(1e-4)
    assert not set(before.values()) & set(changed.values())
    assert len(set(before.values())) == 4
    renamed = write_sweep(**one())
    path = Path(renamed)
    path.write_text(path.read_text().replace("name: study", "name: other"))
    assert hashes(path) == hashes(write_sweep(**one()))


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ({"trainer.max_steps": 3, "model.init_args.optimizr.learning_rate": 1}, "optimizr"),
        ({RATE: 1e-3, "model.init_args.group_size": "many"}, "group_size='many'"),
        ({"trainer.callbacks.AdaptiveLoRA.every_n_rollouts": 1}, "has no callback 'AdaptiveLoRA'"),
        ({"trainer.callbacks.Pressure": 1}, "names no argument"),
    ],
)
def test_setting_that_the_command_refuses_is_named(write_sweep, overrides, setting):
    path = write_sweep(**one(overrides=overrides))
    with pytest.raises(ValueError, match=setting) as refusal:
        hashes(path)
    message = str(refusal.value)
    assert f"{path}: arm 'a': setting {list(overrides)[-1]}=" in message


def test_broken_config_is_refused_with_its_name(write_sweep):
    path = write_sweep(**one(overrides={RATE: 1e-3}))
    (path.parent / "tiny.yaml").write_text("model: {class_path: tropism.Nothing}")
    with pytest.raises(ValueError, match=r"tiny\.yaml is refused as it is"):
        hashes(path)


def test_every_sweep_of_the_repository_is_accepted(monkeypatch):
    repository = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(repository)
    cells, settings = import_module("sweeping.cells"), import_module("sweeping.settings")
    for path in sorted((repository / "experiments").rglob("*.yaml")):
        if "arms" not in yaml.safe_load(path.read_text(encoding="utf-8")):
            continue
        sweep = import_module("sweeping.specification").load(path)
        every = cells.cells_of(sweep)
        first = {
            name: next(k for k, c in every.items() if c.arm.name == name) for name in sweep.arms
        }
        some = set(first.values())
        for name in reversed(sweep.arms):  # one grid point of each arm, and what those name
            some |= {o for k in some if every[k].arm.name == name for o in every[k].refers.values()}
        assert settings.identities(sweep, {key: every[key] for key in every if key in some})
