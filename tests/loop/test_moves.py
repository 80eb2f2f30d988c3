"""Moves of adapters between two moments."""

import pytest
import torch

from tropism.loop.moves import Moves
from tropism.lora.plan import SitePlan
from tropism.models import LoRA, Model, load_policy


@pytest.fixture
def policy():
    torch.manual_seed(0)
    made = load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))
    perturb(made, 0.02)
    return made


def perturb(policy, size: float, *, keys: set[str] | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in policy.sites:
            adapter = policy.adapter(site)
            for factor in (adapter.a, adapter.b):
                if keys is None or site.key in keys:
                    factor.add_(torch.randn(factor.shape, generator=generator), alpha=size)


def plan_of(policy, **scales: float) -> tuple[SitePlan, ...]:
    return tuple(
        SitePlan(s.layer, s.module, "TRAIN", 4, scales.get(s.module, 1.0)) for s in policy.sites
    )


def effective(policy, site) -> torch.Tensor:
    adapter = policy.adapter(site)
    return (adapter.scaling * adapter.b @ adapter.a).detach()


def test_a_move_is_the_change_of_the_effective_weight(policy):
    moves, site = Moves(), policy.sites[3]
    moves.keep(policy, plan_of(policy, **{site.module: 0.5}))
    before = effective(policy, site)
    assert moves.since(policy) == {}
    perturb(policy, 0.01, keys={site.key})
    found = moves.since(policy)
    assert set(found) == {site.key}
    move = found[site.key]
    torch.testing.assert_close(move.left @ move.right, effective(policy, site) - before)
    assert move.lr_scale == 0.5

    resumed = Moves()
    resumed.load_state_dict(moves.state_dict())
    torch.testing.assert_close(resumed.since(policy)[site.key].left, move.left)


def test_what_does_not_train_has_no_move(policy):
    moves = Moves()
    plan = [
        SitePlan(s.layer, s.module, "KEEP" if s.layer == 0 else "TRAIN", 0 if s.layer == 0 else 4)
        for s in policy.sites
    ]
    moves.keep(policy, tuple(plan))
    perturb(policy, 0.01)
    assert {key.split(".")[0] for key in moves.since(policy)} == {str(i) for i in range(1, 12)}
