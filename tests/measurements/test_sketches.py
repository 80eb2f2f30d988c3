"""Sketches: unbiased, of the stated error, and the same everywhere."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from tropism.measurements.sketches import ExactGradients, Sketch, random_signs


def gradient(sketch: Sketch, g: Tensor) -> Tensor:
    """The sketch of one matrix, as of a batch of one row whose delta is the identity."""
    d_out = len(g)
    return sketch("w", torch.eye(d_out)[None], g[None], None).rows[0]


def test_signs_by_hand() -> None:
    # The first bits of Philox under the key's digest, most significant bit of each byte first.
    digest = hashlib.sha256(b"0|1|3.q_proj|input").digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    byte = int(bits.random_raw(1)[0]) & 0xFF
    expected = [1 if byte >> (7 - i) & 1 else -1 for i in range(8)]
    assert random_signs(2, 4, 0, 1, "3.q_proj", "input").flatten().tolist() == expected


def test_signs_are_fair_and_keyed() -> None:
    signs = random_signs(1000, 32, 7, 0, "0.q_proj", "input").float()
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 4 / 32000**0.5
    assert float((signs.mT @ signs / 1000 - torch.eye(32)).abs().max()) < 5 / 1000**0.5
    for other in ((8, 0, "0.q_proj", "input"), (7, 1, "0.q_proj", "input"),
                  (7, 0, "1.q_proj", "input"), (7, 0, "0.q_proj", "output")):  # fmt: skip
        different = random_signs(1000, 32, *other).float()
        assert abs(float((different * signs).mean())) < 4 / 32000**0.5


def test_inner_products_are_unbiased() -> None:
    torch.manual_seed(0)
    g, h = torch.randn(12, 9), torch.randn(12, 9)
    sketches = [Sketch(4, seed=seed) for seed in range(4000)]
    images = [(gradient(s, g), gradient(s, h)) for s in sketches]
    products = torch.stack([torch.stack([a @ a, a @ b]) for a, b in images])
    error = products.std(dim=0) / len(sketches) ** 0.5
    exact = torch.stack([g.square().sum(), (g * h).sum()])
    assert ((products.mean(dim=0) - exact).abs() < 4 * error).all()


def test_error_on_rank_one_is_the_stated_one() -> None:
    torch.manual_seed(0)
    g = torch.outer(torch.randn(96), torch.randn(64))
    ratios = torch.stack(
        [gradient(Sketch(32, seed=seed), g).square().sum() for seed in range(800)]
    ) / g.square().sum()  # fmt: skip
    stated = ((1 + 2 / 32) ** 2 - 1) ** 0.5
    assert stated == pytest.approx(0.36, abs=0.005)
    assert float(ratios.mean()) == pytest.approx(1, abs=4 * stated / 800**0.5)
    assert float(ratios.std()) == pytest.approx(stated, rel=0.12)


def test_error_falls_with_rank() -> None:
    torch.manual_seed(0)
    g = torch.randn(96, 64)
    norms = torch.stack([gradient(Sketch(32, seed=s), g).square().sum() for s in range(200)])
    assert float(norms.std() / norms.mean()) < 0.1


def test_one_sided_norm_is_unbiased() -> None:
    torch.manual_seed(0)
    delta, x, weights = torch.randn(2, 5, 6), torch.randn(2, 5, 7), torch.tensor([1.0, -0.5])
    exact = torch.einsum("m,mso,msi->oi", weights, delta, x).square().sum()
    norms = []
    for seed in range(2000):
        summed = Sketch(8, seed=seed)("w", delta, x, weights).summed
        assert summed is not None
        norms.append(summed.square().sum())
    found = torch.stack(norms)
    assert abs(float(found.mean() - exact)) < 4 * float(found.std()) / 2000**0.5


def test_each_linear_and_pool_has_its_own() -> None:
    torch.manual_seed(0)
    delta, x = torch.randn(1, 6, 5), torch.randn(1, 6, 7)
    first, again, later = Sketch(4), Sketch(4), Sketch(4, pool=1)
    rows = first("0.q_proj", delta, x, None).rows
    again("1.q_proj", delta, x, None)  # the order of first use does not matter
    assert torch.equal(again("0.q_proj", delta, x, None).rows, rows)
    assert not torch.allclose(first("1.q_proj", delta, x, None).rows, rows)
    assert not torch.allclose(later("0.q_proj", delta, x, None).rows, rows)


def test_linear_in_tokens() -> None:
    torch.manual_seed(0)
    delta, x = torch.randn(2, 6, 5), torch.randn(2, 6, 7)
    sketch = Sketch(4)
    whole = sketch("w", delta, x, None).rows
    parts = [sketch("w", delta[:, t], x[:, t], None).rows for t in (slice(0, 2), slice(2, 6))]
    assert torch.allclose(whole, parts[0] + parts[1], atol=1e-5)


def test_exact_by_hand() -> None:
    delta = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])  # two tokens
    x = torch.tensor([[[3.0, 4.0, 5.0], [1.0, 0.0, -1.0]]])
    rows = ExactGradients()("w", delta, x, None).rows
    assert rows.tolist() == [[3.0, 4.0, 5.0, 2.0, 0.0, -2.0]]


def test_refuses_no_size() -> None:
    with pytest.raises(ValueError, match="sketch_size=0"):
        Sketch(0)
