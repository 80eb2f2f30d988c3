"""Signal, noise and their null, on gradients whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tropism.measurements import pressure_statistics as statistics


def double(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def labels(num_prompts: int, num_rows: int) -> Tensor:
    return torch.arange(num_prompts).repeat_interleave(num_rows)


def centred(num_prompts: int, num_rows: int) -> Tensor:
    """Advantages of random binary rewards."""
    rewards = (torch.rand(num_prompts, num_rows) < 0.5).double()
    std = rewards.std(dim=1, keepdim=True)
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / (std + 1e-4)).flatten()


def test_by_hand() -> None:
    # Two prompts of two sequences; g_p = g_1 - g_2 is (2, 1) for the first, (1, -3) for the other.
    rows = torch.tensor([[2.0, 2.0], [0.0, 1.0], [3.0, 0.0], [2.0, 3.0]])
    gram = statistics.gram_matrices([rows, 2 * rows])
    advantages, prompts = double([[1, -1, 1, -1]]), labels(2, 2)
    raw = statistics.raw_energy(gram, advantages, prompts)
    debiased = statistics.debiased_energy(gram, advantages, prompts)
    assert raw.flatten().tolist() == [7.5, 30.0]  # (5 + 10) / 2
    assert debiased.flatten().tolist() == [-1.0, -4.0]  # 2 * (2 - 3) / (2 * 1)
    # Each prompt a probe: the cosine of the two.
    cosine = statistics.consistency(gram, advantages[0], prompts)
    assert cosine.tolist() == pytest.approx([-1 / 50**0.5] * 2)
    assert statistics.signal_share(7.5, -1.0) == 0.0
    assert statistics.noise_scale(7.5, -1.0) is None
    assert statistics.signal_share(7.5, 1.5) == 0.2
    assert statistics.noise_scale(7.5, 1.5) == 4.0
    assert statistics.noise_scale(None, 1.0) is None
    assert statistics.signal_share(0.0, 0.0) is None


def test_groups_of_unequal_size_in_any_order() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 5)
    prompts = torch.tensor([4, 2, 4, 9, 2, 4, 9])
    advantages = torch.randn(1, 7).double()
    gram = statistics.gram_matrices([rows])
    sums = [(advantages[0, prompts == p, None] * rows[prompts == p]).sum(0) for p in (2, 4, 9)]
    raw = sum(float(g @ g) for g in sums) / 3
    cross = sum(float(sums[i] @ sums[j]) for i in range(3) for j in range(3) if i != j) / 6
    assert float(statistics.raw_energy(gram, advantages, prompts)) == pytest.approx(raw)
    assert float(statistics.debiased_energy(gram, advantages, prompts)) == pytest.approx(cross)


def test_debiased_is_unbiased_and_raw_is_not() -> None:
    torch.manual_seed(0)
    num_prompts, num_rows, size = 5, 2, 20
    signal = torch.randn(size).double()
    prompts, advantages = labels(num_prompts, num_rows), double([[1, -1] * num_prompts])
    debiased, raw = [], []
    for _ in range(3000):
        # g_p = signal + noise of variance 8 per entry.
        rows = 2 * torch.randn(num_prompts * num_rows, size).double()
        rows += advantages[0, :, None] * signal / 2
        gram = statistics.gram_matrices([rows])
        debiased.append(statistics.debiased_energy(gram, advantages, prompts))
        raw.append(statistics.raw_energy(gram, advantages, prompts))
    found, error = torch.stack(debiased).mean(), torch.stack(debiased).std() / 3000**0.5
    exact = float(signal.square().sum())
    assert abs(float(found) - exact) < 4 * float(error)
    assert float(error) < 0.03 * exact
    mean_raw = float(torch.stack(raw).mean())
    assert mean_raw == pytest.approx(exact + 8 * size, rel=0.03)
    # The number of prompts at which signal equals noise is then noise / signal.
    scale = statistics.noise_scale(mean_raw, float(found))
    assert scale == pytest.approx(8 * size / exact, rel=0.1)


def test_permutations_stay_in_their_group() -> None:
    groups = torch.tensor([3, 1, 3, 3, 1, 0])
    found = statistics.permutations_within(groups, 3000, np.random.default_rng(0))
    assert torch.equal(groups[found], groups.expand(3000, -1))
    assert torch.equal(found.sort(dim=1).values, torch.arange(6).expand(3000, -1))
    # All 3! * 2! arrangements, equally often.
    _, counts = found.unique(dim=0, return_counts=True)
    assert len(counts) == 12
    assert float(counts.double().std()) < 3 * (3000 / 12) ** 0.5


def test_number_of_arrangements() -> None:
    advantages, groups = double([1, 1, -1, -1, 3, 2, 2]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    assert statistics.num_arrangements(advantages, groups) == pytest.approx(6 * 3)


def null_zs(
    num: int, *, signal: float = 0.0, num_prompts: int = 12, num_sites: int = 6
) -> tuple[Tensor, Tensor]:
    """z of many synthetic pools: [num * sites] and pooled [num].

    Rows have a prompt's own gradient, noise that sites share and noise that they do not, over
    directions of unequal weight; the advantages' part of them is ``signal``.
    """
    prompts, weights = labels(num_prompts, 4), torch.arange(1, 25).double() ** -0.5
    zs, pooled = [], []
    for i in range(num):
        advantages = centred(num_prompts, 4)
        prompt_part = torch.randn(num_sites, num_prompts, 1, 24).expand(-1, -1, 4, -1).flatten(1, 2)
        shared = torch.randn(1, len(prompts), 24)
        rows = prompt_part + shared + torch.randn(num_sites, len(prompts), 24)
        rows = rows * weights + signal * advantages[:, None] * weights
        gram = statistics.gram_matrices(list(rows))
        z, all_sites = statistics.null_z(
            gram, advantages, prompts, num_permutations=200, rng=np.random.default_rng(i)
        )
        zs.append(z)
        pooled.append(all_sites)
    return torch.cat(zs), double(pooled)


def test_null_z_without_signal() -> None:
    torch.manual_seed(0)
    z, pooled = null_zs(400)
    for found, error in ((z, 0.1), (pooled, 0.2)):
        assert abs(float(found.mean())) < error
        assert float(found.std()) == pytest.approx(1, abs=error)
    # A sum of squares is skewed, so both exceed a normal's 2.3 % and 0.13 %; bounds on the rates.
    assert float((z > 2).double().mean()) < 0.065
    assert float((z > 3).double().mean()) < 0.03
    assert float((pooled > 2).double().mean()) < 0.075
    assert float((pooled > 3).double().mean()) < 0.03


def test_null_z_with_signal() -> None:
    torch.manual_seed(0)
    z, pooled = null_zs(40, signal=0.5)
    assert float((z > 2).double().mean()) > 0.8
    # What sites share counts once, so the sum over sites is not sqrt(sites) times surer.
    assert float((pooled > 3).double().mean()) == 1.0


def test_a_loud_site_does_not_drown_the_others() -> None:
    torch.manual_seed(0)
    prompts, advantages = labels(12, 4), centred(12, 4)
    quiet = torch.randn(48, 20) + 0.4 * advantages[:, None]
    loud = 1000 * torch.randn(48, 20)
    options = {"num_permutations": 200}

    def pooled(*rows: Tensor) -> float:
        gram, rng = statistics.gram_matrices([r.float() for r in rows]), np.random.default_rng(0)
        return statistics.null_z(gram, advantages, prompts, rng=rng, **options)[1]

    assert pooled(quiet, loud) > 4
    assert pooled(quiet, loud) == pytest.approx(pooled(quiet, loud / 1000), rel=1e-4)
    assert pooled(quiet, torch.zeros(48, 20)) == pytest.approx(pooled(quiet))


def test_null_is_centred_where_advantages_are_not() -> None:
    # A constant part of the advantages is no evidence, however large the gradients it sums.
    torch.manual_seed(0)
    prompts, gaps = labels(10, 4), centred(10, 4)
    rows = torch.randn(40, 30) + 3.0  # all sequences share a direction
    gram = statistics.gram_matrices([rows])
    z, _ = statistics.null_z(
        gram, gaps + 1.0, prompts, num_permutations=400, rng=np.random.default_rng(0)
    )
    assert float(statistics.debiased_energy(gram, gaps[None] + 1.0, prompts)) > 1000
    assert abs(float(z)) < 2.5


def test_z_is_free_of_scale_and_keyed() -> None:
    torch.manual_seed(0)
    prompts, advantages, rows = labels(8, 4), centred(8, 4), torch.randn(32, 10)

    def z(factor: float, seed: int) -> float:
        return statistics.null_z(
            statistics.gram_matrices([factor * rows]),
            advantages,
            prompts,
            num_permutations=100,
            rng=np.random.default_rng(seed),
        )[1]

    assert z(1.0, 0) == z(1.0, 0)
    assert z(1e-6, 0) == pytest.approx(z(1.0, 0), rel=1e-4)
    assert z(1.0, 0) != z(1.0, 1)


@pytest.mark.parametrize(
    ("num_prompts", "advantages"),
    [
        (1, [1.0, 0.5, -0.5, -1.0]),  # one prompt
        (2, [1.0, -1.0, 1.0, -1.0]),  # 4 arrangements
        (2, [0.0, 0.0, 0.0, 0.0]),  # no signal
        (0, []),
    ],
)
def test_undefined(num_prompts: int, advantages: list[float]) -> None:
    prompts = labels(num_prompts, len(advantages) // max(num_prompts, 1))
    torch.manual_seed(0)
    gram = statistics.gram_matrices([torch.randn(len(advantages), 3)])
    z, pooled = statistics.null_z(
        gram, double(advantages), prompts, num_permutations=10, rng=np.random.default_rng(0)
    )
    assert math.isnan(float(z))
    assert math.isnan(pooled)
    debiased = statistics.debiased_energy(gram, double(advantages)[None], prompts)
    assert bool(debiased.isnan()) == (num_prompts < 2)
    assert bool(statistics.consistency(gram, double(advantages), prompts).isnan()) == (
        not any(advantages) or num_prompts < 2
    )


def test_identical_rows_have_no_null() -> None:
    # Equal gradients: every permutation gives the same, so nothing is known.
    prompts, advantages = labels(6, 4), centred(6, 4)
    gram = statistics.gram_matrices([torch.full((24, 3), 0.1)])
    z, _ = statistics.null_z(
        gram, advantages + 1.0, prompts, num_permutations=50, rng=np.random.default_rng(0)
    )
    assert math.isnan(float(z))


def test_consistency_follows_probes() -> None:
    # Probes 1, 2, 3 in another order of rows: the mean cosine of 1-2 and 2-3.
    rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    gram = statistics.gram_matrices([rows])
    found = statistics.consistency(gram, double([1, 1, 1]), torch.tensor([3, 1, 2]))
    assert float(found) == pytest.approx(0.5**0.5)
    found = statistics.consistency(gram, double([1, 1, 1]), torch.tensor([1, 2, 3]))
    assert float(found) == pytest.approx((0 + 0.5**0.5) / 2)
