"""Damage at preserved norms, and what finds it."""

import json
import math

import numpy as np
import pytest
import torch

from tropism.measurements.alignment import Alignment, Moments, log_correlation, misalignment
from tropism.measurements.layer_names import LinearSite
from tropism.organism import planted
from tropism.organism.damage import ANGLES, angle_of_cost, rotate, rotation
from tropism.organism.planted import DAMAGE_FILE, build, damaged_keys
from tropism.weights import resolve, source_of


def test_a_rotation_turns_every_vector_by_the_angle():
    turn = rotation(8, 30.0, np.random.default_rng(0))
    torch.testing.assert_close(turn @ turn.mT, torch.eye(8, dtype=torch.float64))
    vectors = torch.randn(5, 8, dtype=torch.float64)
    cosines = torch.cosine_similarity(vectors, vectors @ turn.mT)
    torch.testing.assert_close(
        cosines, torch.full((5,), math.cos(math.radians(30)), dtype=cosines.dtype)
    )


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_damage_keeps_every_singular_value(side):
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    turned = rotate(weight, 60.0, side=side, rng=np.random.default_rng(1))
    assert not torch.allclose(turned, weight, atol=0.1)
    torch.testing.assert_close(torch.linalg.svdvals(turned), torch.linalg.svdvals(weight))


def test_the_angle_of_a_cost_is_read_off_between_two_angles():
    quadratic = [1e-6 * angle**2 for angle in ANGLES]
    assert angle_of_cost(quadratic, 1e-6 * 25**2) == 25
    assert angle_of_cost(quadratic, 1e-6 * 3**2) == 3
    assert angle_of_cost(quadratic, 1.0) is None


def test_log_correlation_is_one_for_multiples_and_lower_once_turned():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    matrix = factor @ torch.diag(torch.logspace(-2, 1, 12, dtype=torch.float64)) @ factor.mT
    assert log_correlation(matrix, 7 * matrix) == pytest.approx(1.0)
    turn = rotation(12, 60.0, np.random.default_rng(0))
    assert log_correlation(matrix, turn @ matrix @ turn.mT) < 0.7
    assert log_correlation(torch.eye(3, dtype=torch.float64), matrix[:3, :3]) is None
    assert log_correlation(torch.zeros(3, 3, dtype=torch.float64), matrix[:3, :3]) is None


def test_moments_are_those_of_the_tokens_that_something_flows_back_to():
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.randn(2, 3, 4, generator=generator), torch.randn(2, 3, 5, generator=generator)
    delta[0, 2] = 0  # padding
    moments = Moments()
    moments("q", delta[:1], x[:1], None)
    moments("q", delta[1:], x[1:], None)
    kept = torch.cat([x[0, :2], x[1]])
    flows = torch.cat([delta[0, :2], delta[1]])
    expected = torch.cov(kept.double().T, correction=0)
    torch.testing.assert_close(moments.inputs("q"), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        moments.gradients("q"), (flows.T @ flows).double() / 5, rtol=1e-5, atol=1e-6
    )
    assert moments.inputs("k") is None


def test_misalignment_is_against_the_same_module_in_other_layers():
    sites = [LinearSite(f"l.{i}.q", i, "q") for i in range(5)] + [LinearSite("head", None, "head")]
    inputs = [0.8, 0.7, 0.8, 0.9, 0.1]
    values = {site.key: Alignment(v, 0.5) for site, v in zip(sites, inputs, strict=False)}
    values["head"] = Alignment(0.0, 0.0)
    scores = misalignment(values, sites)
    assert scores[5] is None
    # Others' medians minus own: -0.05, 0.1, -0.05, -0.15, 0.7; their median size is 0.1.
    assert scores[4] == pytest.approx(0.7 / 0.1)
    assert max(score for score in scores[:4]) < scores[4]


def test_a_planted_organism_is_a_name_and_is_built_once(tmp_path, monkeypatch):
    built = []

    def stand_in(folder, seed):
        built.append(seed)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("{}")
        (folder / DAMAGE_FILE).write_text(
            json.dumps(
                {"sites": [{"layer": 3, "module": "q_proj"}, {"layer": 0, "module": "up_proj"}]}
            )
        )

    monkeypatch.setattr(planted, "build", stand_in)
    folder = resolve("organism-planted-3", cache_dir=tmp_path)
    assert resolve("organism-planted-3", cache_dir=tmp_path) == folder
    assert resolve("organism-planted-12", cache_dir=tmp_path) != folder
    assert built == [3, 12]
    assert damaged_keys(folder) == {"3.q_proj", "0.up_proj"}
    assert source_of(folder)["name"] == "organism-planted-3"
    with pytest.raises(ValueError, match="only hub ids"):
        resolve("organism-planted-3", revision="main", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="is no alias"):
        resolve("organism-planted-x", cache_dir=tmp_path)


@pytest.mark.long
def test_a_planted_organism_is_built_the_same_again(tmp_path):
    found = build(tmp_path / "one", 7)
    again = build(tmp_path / "two", 7)
    assert found == again
    assert 0.2 <= found["fall"] <= 0.5
    assert json.loads((tmp_path / "one" / DAMAGE_FILE).read_text())["fall"] == found["fall"]
