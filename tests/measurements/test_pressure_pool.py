"""Pools of probes: what they keep, what they say, and that a resumed one goes on bit for bit."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import Tensor

from tropism.measurements.captured_energy import captured_energy
from tropism.measurements.gradient_probe import GradientProbe, RowGradients, linear_shape
from tropism.measurements.layer_names import name_sites
from tropism.measurements.pressure import PressureEstimate
from tropism.measurements.pressure_pool import PressurePool
from tropism.measurements.probe_rows import choose_probe_rows
from tropism.measurements.records import TABLES, RecordTable, read
from tropism.models import LoRA, Model, load_policy

SITES = name_sites(["model.layers.0.q_proj", "model.layers.0.up_proj", "model.layers.1.q_proj"])
SHAPES = [(6, 10), (16, 10), (6, 10)]
COMPONENTS = ("correct", "format")


def make_pool(**options) -> PressurePool:
    settings = {"components": COMPONENTS, "sketch_size": 16, "max_rows": 64, **options}
    return PressurePool(SITES, SHAPES, **settings)


def advantages_of(generator: torch.Generator, num_rows: int = 4) -> Tensor:
    values = torch.randn(num_rows, generator=generator)
    return values - values.mean()


def planted(pool: PressurePool, generator: torch.Generator, advantages: Tensor) -> RowGradients:
    """Gradients that follow the advantages at the second linear only."""
    rows, summed = [], []
    for i, (site, (d_out, d_in)) in enumerate(zip(SITES, SHAPES, strict=True)):
        g = torch.randn(len(advantages), d_out, d_in, generator=generator)
        if i == 1:
            g = g + advantages[:, None, None] * torch.ones(d_out, d_in)
        delta = torch.eye(d_out).expand(len(advantages), -1, -1)
        measured = pool.sketch(site.key, delta, g, advantages)
        assert measured.summed is not None
        rows.append(measured.rows)
        summed.append(measured.summed)
    return RowGradients(tuple(rows), tuple(summed))


def fill(pool: PressurePool, num_probes: int, *, start: int = 0, num_prompts: int = 2) -> None:
    for probe in range(start, start + num_probes):
        generator = torch.Generator().manual_seed(probe)
        for _ in range(num_prompts):
            advantages = advantages_of(generator)
            pool.add(
                planted(pool, generator, advantages),
                advantages=advantages,
                component_advantages=torch.stack([advantages, -advantages]),
                probe=probe,
            )


def test_finds_the_planted_site() -> None:
    pool = make_pool()
    fill(pool, 8)
    estimate = pool.estimate(rank=2)
    noise, signal, other = estimate.sites
    assert [(site.layer, site.module) for site in estimate.sites] == [
        (0, "q_proj"), (0, "up_proj"), (1, "q_proj"),
    ]  # fmt: skip
    assert signal.null_z > 5
    assert estimate.pooled_z > 3
    assert signal.snr > 0.3
    assert signal.consistency > 0.3
    for site in (noise, other):
        assert site.null_z < 3
        assert site.snr < 0.2
    assert signal.noise_scale == pytest.approx(1 / signal.snr - 1)
    raw, debiased = (sum(getattr(s, n) for s in estimate.sites) for n in ("raw_sq", "debiased_sq"))
    assert estimate.noise_scale == pytest.approx((raw - debiased) / debiased)
    assert (estimate.probes_pooled, estimate.num_prompts) == (8, 16)


def test_captured_gain_and_energy() -> None:
    pool = make_pool()
    fill(pool, 8)
    random, own = pool.estimate(rank=2), pool.estimate(rank=2, is_gradient_subspace=True)
    for site, other, (d_out, d_in) in zip(random.sites, own.sites, SHAPES, strict=True):
        debiased = max(site.debiased_sq, 0.0)
        assert site.captured_gain == pytest.approx(debiased * (2 / d_in) / (2 * (d_in + d_out)))
        assert other.captured_gain == pytest.approx(
            debiased * site.captured_energy / (2 * (d_in + d_out))
        )
    # The planted gradient has rank 1, so two directions hold more of it than of noise.
    assert random.sites[1].captured_energy > random.sites[0].captured_energy + 0.1


def test_captured_energy_is_of_the_sum_over_prompts() -> None:
    pool = make_pool(max_rows=8)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(16, 10)
    for probe in range(4):  # the first two leave the pool, not the sum
        advantages = advantages_of(generator)
        gradients = planted(pool, generator, advantages)
        total += gradients.summed[0]
        pool.add(
            gradients, advantages=advantages, component_advantages=torch.zeros(2, 4), probe=probe
        )
    assert pool.num_prompts == 2
    assert pool.estimate(rank=3).sites[0].captured_energy == captured_energy(total, 3)


def test_oldest_prompts_leave_whole() -> None:
    pool, newest = make_pool(max_rows=14), make_pool(max_rows=14)
    fill(pool, 5)
    assert (pool.num_rows, pool.num_prompts, pool.probes_pooled) == (12, 3, 2)
    # What is left is what a pool of the newest three prompts says.
    for probe, skipped in ((3, 1), (4, 0)):
        generator = torch.Generator().manual_seed(probe)
        for prompt in range(2):
            advantages = advantages_of(generator)
            gradients = planted(newest, generator, advantages)
            if prompt >= skipped:
                newest.add(gradients, advantages=advantages, probe=probe)
    fields = [(s.raw_sq, s.debiased_sq, s.null_z, s.consistency) for s in pool.estimate().sites]
    assert fields == [
        (s.raw_sq, s.debiased_sq, s.null_z, s.consistency) for s in newest.estimate().sites
    ]


def test_reward_components() -> None:
    pool = make_pool()
    fill(pool, 8)
    found, estimate = pool.reward_gradients(), pool.estimate()
    for i, site in enumerate(estimate.sites):
        assert found.norm_sq("correct", i) == pytest.approx(site.debiased_sq)
        assert found.raw_sq("format", i) == pytest.approx(site.raw_sq)
        assert found.cosine("correct", "format", i) == pytest.approx(-1.0)


def test_new_pool_draws_new_sketches() -> None:
    pool = make_pool()
    fill(pool, 3)
    before = pool.estimate()
    pool.new_pool()
    assert pool.num_rows == 0
    empty = pool.estimate().sites[0]
    assert (empty.raw_sq, empty.captured_energy) == (None, None)
    fill(pool, 3)
    after = pool.estimate()
    assert after.sites[0].raw_sq != before.sites[0].raw_sq
    assert after.sites[0].raw_sq == pytest.approx(before.sites[0].raw_sq, rel=0.3)


def test_resumes_bit_for_bit() -> None:
    whole, half, resumed = make_pool(max_rows=30), make_pool(max_rows=30), make_pool(max_rows=30)
    for pool in (whole, half):
        fill(pool, 2)
        pool.new_pool()
        fill(pool, 3, start=2)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for pool in (whole, resumed):
        fill(pool, 2, start=5)
    assert resumed.estimate() == whole.estimate()
    assert torch.equal(resumed.gram(), whole.gram())
    assert torch.equal(resumed.reward_gradients().products, whole.reward_gradients().products)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"other seed \(0\) than this run \(1\)"),
        ({"sketch_size": 8}, "sketch_size"),
        ({"components": ("correct",)}, "components"),
    ],
)
def test_refuses_another_pools_state(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool(**options).load_state_dict(make_pool().state_dict())


def test_undefined_is_none() -> None:
    def numbers(estimate: PressureEstimate) -> list[float | None]:
        return [v for s in estimate.sites for v in (*s.record().values(), *s.signals().values())]

    pool = make_pool()
    nothing = [None, None, None, None, None]
    assert numbers(pool.estimate())[2:7] == nothing
    generator = torch.Generator().manual_seed(0)
    pool.add(planted(pool, generator, torch.zeros(4)), advantages=torch.zeros(4), probe=0)
    pool.add(planted(pool, generator, torch.zeros(4)), advantages=torch.zeros(4), probe=1)
    estimate = pool.estimate()
    assert estimate.pooled_z is None
    assert estimate.noise_scale is None
    assert numbers(estimate)[2:7] == nothing
    pool.new_pool()
    fill(pool, 1, num_prompts=1)
    site = pool.estimate().sites[0]
    assert site.raw_sq > 0
    assert (site.debiased_sq, site.snr, site.null_z, site.consistency) == (None,) * 4


def test_rows_fit_the_table(tmp_path) -> None:
    pool = make_pool()
    fill(pool, 2)
    estimate = pool.estimate()
    table = RecordTable(tmp_path, "pressure")
    table.append([site.record() for site in estimate.sites], rollout=3, step=3)
    frame = read(tmp_path, "pressure")
    assert set(TABLES["pressure"]) < set(frame.columns)
    assert frame["raw_sq"].tolist() == [site.raw_sq for site in estimate.sites]


def test_refusals() -> None:
    pool, generator = make_pool(max_rows=4), torch.Generator().manual_seed(0)
    advantages = advantages_of(generator, 5)
    gradients = planted(pool, generator, advantages)
    with pytest.raises(ValueError, match="max_rows=4 is less than the 5 completions"):
        pool.add(gradients, advantages=advantages, probe=0)
    with pytest.raises(ValueError, match="component_advantages has shape"):
        pool.add(
            gradients, advantages=advantages[:4], component_advantages=torch.zeros(3, 4), probe=0
        )
    with pytest.raises(ValueError, match="1 gradients for 3 linears"):
        pool.add(RowGradients(gradients.rows[:1]), advantages=advantages[:4], probe=0)
    with pytest.raises(ValueError, match="max_rows=1"):
        make_pool(max_rows=1)


def test_organism_with_lora_on_top(organism: str) -> None:
    """What is planted in advantages shows at every layer, adapted or not."""
    policy = load_policy(Model(organism, dtype="float32"), LoRA(rank=4, alpha=8, layers=(11,)))
    linears = [(site, policy.linear(site)) for site in policy.sites]
    pool = PressurePool(policy.sites, [linear_shape(linear) for _, linear in linears])
    rng, group = np.random.default_rng(0), torch.tensor([1.0, -1.5, 2.0, -1.5])
    torch.manual_seed(0)
    for rollout in range(8):
        # Good completions repeat one token, bad ones another; prompts differ.
        good, bad = torch.full((8,), 40), torch.full((8,), 50)
        prompt = torch.randint(4, policy.base.config.vocab_size, (10,))
        tokens = torch.stack([torch.cat([prompt, end]) for end in (good, bad, good, bad)])
        (chosen,) = choose_probe_rows(
            group, group_size=4, num_prompts=1, num_completions=4, rng=rng
        )
        rows = list(chosen.rows)
        with GradientProbe(linears, policy.base.get_input_embeddings(), pool.sketch) as probe:
            decoder = policy.base.get_decoder()
            hidden = decoder(input_ids=tokens[rows, :-1], use_cache=False).last_hidden_state
            logprobs = policy.head(hidden[:, 9:]).log_softmax(-1)
            chosen_logprobs = logprobs.gather(2, tokens[rows, 10:, None])
            gradients = probe.backward(-chosen_logprobs.sum(), row_weights=group[rows])
        pool.add(gradients, advantages=group[rows], probe=rollout)
    estimate = pool.estimate(rank=4)
    assert len(estimate.sites) == 12 * 7
    assert estimate.pooled_z > 3
    assert sum(site.null_z > 3 for site in estimate.sites if site.layer < 11) > 20
    assert all(site.raw_sq > 0 and site.captured_energy > 0 for site in estimate.sites)
    assert all(parameter.grad is None for parameter in policy.model.parameters())
