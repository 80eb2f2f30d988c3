"""UpdateNorms on the stand-in: every number against dense fp64, resumed runs, images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tropism.measurements import records
from tropism_callbacks import Checkpoint, UpdateNorms


class Dense(Callback):
    """The weights in use after every rollout, W + scaling B A, in fp64."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def keep(self, policy: Any) -> None:
        self.weights.append({})
        for site in policy.sites:
            weight = policy.linear(site).weight.double()
            if policy.uses_lora:
                adapter = policy.adapter(site)
                weight = weight + adapter.scaling * adapter.b.double() @ adapter.a.double()
            self.weights[-1][site.name] = weight.clone()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.keep(pl_module.policy)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(pl_module.policy)


def expected(dense: Dense, start: dict[str, Tensor] | None = None) -> tuple[list[float], ...]:
    """update_norm and step_norm in the order of the rows."""
    start = start or dense.weights[0]
    total, step = [], []
    for before, after in zip(dense.weights, dense.weights[1:], strict=False):
        for name, weight in after.items():
            total.append(float((weight - start[name]).norm() / start[name].norm()))
            step.append(float((weight - before[name]).norm() / start[name].norm()))
    return total, step


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_rollouts": 0}, "every_n_rollouts=0"),
        ({"heat_map_every": -1}, "heat_map_every=-1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UpdateNorms(**settings)


@pytest.mark.parametrize("uses_lora", [True, False])
def test_every_row_is_the_dense_norm(
    make_run: Callable[..., Any], stand_in: type, uses_lora: bool
) -> None:
    dense = Dense()
    run = make_run(UpdateNorms(), dense, module=stand_in(uses_lora=uses_lora)).fit()
    rows = records.read(run.folder, "update_norms")
    total, step = expected(dense)
    np.testing.assert_allclose(rows["update_norm"], total, rtol=2e-5)
    np.testing.assert_allclose(rows["step_norm"], step, rtol=2e-5, atol=1e-9)
    assert rows["rollout"].tolist() == sorted([0, 1, 2, 3] * 4)
    assert rows["layer"].tolist()[:4] == [0, 0, 1, 1]
    assert rows["module"].tolist()[:4] == ["up_proj", "q_proj"] * 2
    assert set(rows["rank"]) == {2 if uses_lora else 3}
    assert set(rows["state"]) == {"TRAIN"}
    skipped = rows[rows["rollout"] == 1]
    assert skipped["step_norm"].tolist() == [0.0] * 4
    first = rows[rows["rollout"] == 0]
    assert skipped["update_norm"].tolist() == first["update_norm"].tolist()
    assert (first["update_norm"] > 0).all()


def test_relative_to_the_adapter_that_the_run_started_from(
    make_run: Callable[..., Any], stand_in: type
) -> None:
    module = stand_in()
    with torch.no_grad():
        for site in module.policy.sites:
            adapter = module.policy.adapter(site)
            adapter.b.fill_(0.3)
            module.policy.starting[site.name] = (adapter.a.clone(), adapter.b.clone())
    dense = Dense()
    run = make_run(UpdateNorms(), dense, module=module).fit()
    rows = records.read(run.folder, "update_norms")
    np.testing.assert_allclose(rows["update_norm"], expected(dense)[0], rtol=2e-5)


def test_a_linear_without_adapter_is_off(make_run: Callable[..., Any], stand_in: type) -> None:
    module = stand_in()
    bare = module.policy.sites[0]
    adapter_of = module.policy.adapter
    module.policy.adapter = lambda site: None if site == bare else adapter_of(site)
    rows = records.read(make_run(UpdateNorms(), module=module).fit().folder, "update_norms")
    off = rows[rows["state"] == "OFF"]
    assert off["layer"].tolist() == [0] * 4
    assert off[["rank", "update_norm", "step_norm"]].to_numpy().max() == 0


def test_cadence_and_the_last_rollout(make_run: Callable[..., Any]) -> None:
    dense = Dense()
    run = make_run(UpdateNorms(every_n_rollouts=2), dense).fit()
    rows = records.read(run.folder, "update_norms")
    assert rows["rollout"].unique().tolist() == [0, 2, 3]
    total, step = (np.array(values).reshape(4, 4)[[0, 2, 3]] for values in expected(dense))
    np.testing.assert_allclose(rows["update_norm"], total.flatten(), rtol=2e-5)
    np.testing.assert_allclose(rows["step_norm"], step.flatten(), rtol=2e-5)


@pytest.mark.parametrize("uses_lora", [True, False])
def test_a_resumed_run_measures_from_the_same_start(
    make_run: Callable[..., Any], stand_in: type, uses_lora: bool
) -> None:
    def callbacks() -> tuple[Callback, ...]:
        return UpdateNorms(), Checkpoint(every_n_rollouts=2)

    whole = make_run(*callbacks(), module=stand_in(uses_lora=uses_lora), name="whole").fit()
    run = make_run(*callbacks(), module=stand_in(uses_lora=uses_lora, fail_at=3))
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    again = make_run(*callbacks(), module=stand_in(uses_lora=uses_lora))
    again.fit(run.folder / "checkpoints" / "last.ckpt")
    pd.testing.assert_frame_equal(
        records.read(again.folder, "update_norms"),
        records.read(whole.folder, "update_norms"),
        check_exact=True,
    )


def test_full_parameter_start_that_is_unknown_is_refused(
    make_run: Callable[..., Any], stand_in: type
) -> None:
    run = make_run(Checkpoint(every_n_rollouts=2), module=stand_in(uses_lora=False, fail_at=2))
    with pytest.raises(RuntimeError, match="row 3"):
        run.fit()
    again = make_run(Checkpoint(), UpdateNorms(), module=stand_in(uses_lora=False))
    with pytest.raises(ValueError, match="UpdateNorms was not part of the run"):
        again.fit(run.folder / "checkpoints" / "last.ckpt")


def test_state_round_trip(make_run: Callable[..., Any], stand_in: type) -> None:
    norms = UpdateNorms()
    make_run(norms, module=stand_in(uses_lora=False)).fit()
    other = UpdateNorms()
    other.load_state_dict(norms.state_dict())
    assert other.state_dict().keys() == {"start_weights"}
    for name, weight in norms.state_dict()["start_weights"].items():
        assert torch.equal(other.state_dict()["start_weights"][name], weight)


def test_heat_maps_in_tensorboard(
    make_run: Callable[..., Any], events: Callable[[Path], Any]
) -> None:
    read = events(make_run(UpdateNorms(heat_map_every=2)).fit().folder)
    for name in ("update_norms/cumulative", "update_norms/step"):
        images = read.Images(name)
        assert [image.step for image in images] == [0, 2, 3]
        assert images[0].width > 300
        assert images[0].encoded_image_string.startswith(b"\x89PNG")


def test_no_heat_maps_where_switched_off(
    make_run: Callable[..., Any], events: Callable[[Path], Any]
) -> None:
    assert events(make_run(UpdateNorms(heat_map_every=0)).fit().folder).Tags()["images"] == []
