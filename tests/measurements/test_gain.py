"""Gains of moves by hand, their null by enumeration, and the KL that linears share."""

import itertools

import pytest
import torch

from tropism.measurements.gain import GainPool, Move, WithMoves
from tropism.measurements.layer_names import LinearSite
from tropism.measurements.sketches import ExactGradients

SITES = tuple(LinearSite(f"layers.{i}.q_proj", i, "q_proj") for i in range(3))


def measured(along: dict[str, list[float]], scales: dict[str, float] | None = None) -> WithMoves:
    """As after a backward of losses -log pi: ``along`` has the changes of log pi."""
    moves = {
        key: Move(torch.zeros(2, 1), torch.zeros(1, 2), (scales or {}).get(key, 1.0))
        for key in along
    }
    made = WithMoves(ExactGradients(), moves)
    made.along = {key: -torch.tensor(values) for key, values in along.items()}
    return made


def pool_of(*prompts, weights=None, **settings) -> GainPool:
    pool = GainPool(SITES)
    for probe, (along, advantages) in enumerate(prompts):
        own = torch.tensor(weights or [1.0] * len(advantages))
        losses = measured(along, **settings)
        losses.along = {key: values * own for key, values in losses.along.items()}
        pool.add(losses, weights=own, advantages=torch.tensor(advantages), probe=probe)
    return pool


def test_by_hand():
    pool = pool_of(
        ({"0.q_proj": [0.3, 0.1], "1.q_proj": [0.0, 0.2]}, [1.0, -1.0]),
        ({"0.q_proj": [0.1, 0.1], "1.q_proj": [-0.2, 0.4]}, [0.5, -1.5]),
    )
    found = pool.estimate()
    first, second, third = found.sites
    assert first.gain == pytest.approx((0.2 + 0.0) / 2)
    assert second.gain == pytest.approx((-0.2 - 0.6) / 2)
    # sums 0.2 - 0.2 of the first prompt, and -0.6 of the second; variances of two rows are squares
    assert first.gain_z == pytest.approx(0.2 / 0.2)
    assert second.gain_z == pytest.approx(-0.8 / (0.2**2 + 0.6**2) ** 0.5)
    assert found.z == pytest.approx(-0.6 / 0.6)
    assert (third.gain, third.gain_z, third.kl) == (None, None, None)
    assert {site.probes_pooled for site in found.sites} == {2}
    together = torch.tensor([0.3, 0.3, -0.1, 0.5])
    assert found.kl == pytest.approx(0.5 * float(together.square().mean()))
    assert first.kl + second.kl == pytest.approx(found.kl)


def test_the_null_is_that_of_all_permutations():
    moved, advantages = [0.3, -0.2, 0.7, 0.1], [1.0, 0.2, -0.9, 0.4]
    (site, *_) = pool_of(({"0.q_proj": moved}, advantages)).estimate().sites
    d = torch.tensor(moved).double()
    d -= d.mean()
    draws = torch.tensor(
        [float(torch.tensor(p).double() @ d) for p in itertools.permutations(advantages)]
    )
    assert float(draws.mean()) == pytest.approx(0, abs=1e-7)
    assert site.gain_z == pytest.approx(site.gain / float(draws.std(unbiased=False)), rel=1e-5)


def test_gain_is_per_unit_of_step_size_and_the_total_is_not():
    along = {"0.q_proj": [0.4, 0.0], "1.q_proj": [0.1, 0.0]}
    once = pool_of((along, [1.0, -1.0])).estimate()
    found = pool_of((along, [1.0, -1.0]), scales={"0.q_proj": 2.0}).estimate()
    assert found.sites[0].gain == pytest.approx(once.sites[0].gain / 2)
    assert found.sites[0].kl == pytest.approx(once.sites[0].kl)
    assert found.z == once.z


def test_rows_that_do_not_count_are_left_out():
    along = {"0.q_proj": [0.4, 0.0, 9.0]}
    pool = pool_of((along, [1.0, -1.0, 5.0]), weights=[0.5, 0.5, 0.0])
    assert pool.estimate().sites[0].gain == pytest.approx(0.5 * 0.4)
    assert pool.estimate().kl == pytest.approx(0.5 * 0.4**2 / 2)


def test_records_hold_what_the_gain_is_made_of():
    pool = pool_of(({"0.q_proj": [0.3, 0.1]}, [1.0, 0.0]), ({"0.q_proj": [0.0, 0.4]}, [2.0, 0.0]))
    rows = pool.records()
    assert [row["prompt"] for row in rows] == [0, 0, 1, 1]
    gain = sum(row["advantage"] * row["changes"][0] for row in rows) / 2
    assert gain == pytest.approx(pool.estimate().sites[0].gain)


@pytest.mark.parametrize(
    ("second", "shared"), [([0.2, -0.1], 0.5), ([0.1, 0.2], 0.0)], ids=["the same", "orthogonal"]
)
def test_shared_kl(second, shared):
    found = pool_of(({"0.q_proj": [0.2, -0.1], "1.q_proj": second}, [1.0, -1.0])).estimate()
    assert found.shared_kl == pytest.approx(shared, abs=1e-6)


def test_an_empty_pool_knows_nothing():
    found = GainPool(SITES).estimate()
    assert (found.z, found.kl, found.shared_kl) == (None, None, None)
    assert all(site.gain is None for site in found.sites)


def test_a_saved_pool_goes_on():
    pool = pool_of(({"0.q_proj": [0.3, 0.1]}, [1.0, -1.0]))
    other = GainPool(SITES)
    other.load_state_dict(pool.state_dict())
    assert other.estimate() == pool.estimate()
    pool.new_pool()
    assert pool.estimate() == GainPool(SITES).estimate()


def test_along_is_the_inner_product_with_each_rows_gradient():
    generator = torch.Generator().manual_seed(0)
    delta, x = (torch.randn(2, 3, size, generator=generator) for size in (4, 5))
    left, right = torch.randn(4, 2, generator=generator), torch.randn(2, 5, generator=generator)
    made = WithMoves(ExactGradients(), {"0.q_proj": Move(left, right)})
    gradients = made("0.q_proj", delta, x, None).rows  # [2, 4 * 5]
    expected = gradients @ (left @ right).flatten()
    torch.testing.assert_close(made.along["0.q_proj"], expected)
    made("0.q_proj", delta, x, None)  # used twice in one forward
    torch.testing.assert_close(made.along["0.q_proj"], 2 * expected)
    made("1.q_proj", delta, x, None)
    assert set(made.along) == {"0.q_proj"}
