"""Layer x module matrices, and that their drawing shows them."""

from __future__ import annotations

import numpy as np
import pytest

from tropism.measurements.heat_map import draw_heat_map, layer_by_module, render
from tropism.measurements.layer_names import name_sites

SITES = name_sites(["layers.0.q_proj", "layers.0.up_proj", "layers.1.q_proj", "lm_head"])


def test_matrix_by_hand() -> None:
    matrix, layers, modules = layer_by_module(SITES, [1.0, 2.0, None, 4.0])
    assert layers == ["0", "1", "other"]
    assert modules == ["q_proj", "up_proj", "lm_head"]
    nan = np.nan
    np.testing.assert_array_equal(matrix, [[1, 2, nan], [nan, nan, nan], [nan, nan, 4]])


def test_one_value_per_site_is_required() -> None:
    with pytest.raises(ValueError, match="zip"):
        layer_by_module(SITES, [1.0])


def test_drawing_has_one_scale_from_zero_and_leaves_pyplot_alone() -> None:
    import matplotlib.pyplot as plt

    matrix, layers, modules = layer_by_module(SITES, [1.0, 2.0, None, 4.0])
    figure = draw_heat_map(matrix, layers, modules, title="t")
    image = figure.axes[0].images[0]
    assert image.get_clim() == (0.0, 4.0)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == modules
    pixels = render(figure)
    assert pixels.shape == (*figure.canvas.get_width_height()[::-1], 3)
    assert pixels.std() > 10
    assert plt.get_fignums() == []


@pytest.mark.parametrize("value", [0.0, None])
def test_drawing_of_nothing(value: float | None) -> None:
    matrix, layers, modules = layer_by_module(SITES, [value] * 4)
    assert render(draw_heat_map(matrix, layers, modules, title="t")).size > 0
