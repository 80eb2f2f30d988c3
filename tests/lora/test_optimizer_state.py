from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tropism.lora.optimizer_state import load_by_name, load_state_by_name, state_by_name
from tropism.optimization import AdamW

SITES = ("layers.0.up", "layers.1.up")


def parameters(seed: int = 0, rank: int = 2) -> dict[str, nn.Parameter]:
    """Two adapters of the same shapes: by position, one would do for the other."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{site}.lora_{side}.default.weight": nn.Parameter(torch.randn(shape, generator=generator))
        for site in SITES
        for side, shape in (("A", (rank, 3)), ("B", (3, rank)))
    }


def step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(named):
        named[name].grad = torch.randn(named[name].shape, generator=generator)
    optimizer.step()


def reordered(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return dict(reversed(named.items()))


def trained() -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    named = parameters()
    optimizer, _ = AdamW(weight_decay=0.1).build(named, num_steps=10)
    for i in range(3):
        step(optimizer, named, seed=i)
    return named, optimizer


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_moments_go_by_name_whatever_the_order() -> None:
    named, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    other = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    wrong, _ = AdamW(weight_decay=0.1).build(reordered(other), num_steps=10)
    wrong.load_state_dict(copy.deepcopy(saved))  # torch's own way: no error, another's moments
    name, last = f"{SITES[0]}.lora_A.default.weight", f"{SITES[1]}.lora_B.default.weight"
    assert wrong.state[other[last]]["exp_avg"].shape != other[last].shape

    right, _ = AdamW(weight_decay=0.1).build(reordered(other), num_steps=10)
    load_by_name(right)
    right.load_state_dict(saved)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(right.state[other[name]][key], optimizer.state[named[name]][key])
    assert [g["param_names"] for g in right.param_groups] == [
        [f"{site}.lora_{side}.default.weight" for side in "BA"] for site in reversed(SITES)
    ]
    step(optimizer, named, seed=9)
    step(right, other, seed=9)
    assert_same(dict(named), dict(other))


def test_layers_in_another_order_are_what_torch_gets_wrong_silently() -> None:
    """The very case: equal shapes everywhere, layer 0's moments for layer 1."""
    named, optimizer = trained()
    names = list(named)
    swapped = {name: named[name] for name in (*names[2:], *names[:2])}
    silent, _ = AdamW().build(swapped, num_steps=10)
    silent.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first = named[names[0]]
    theirs, mine = optimizer.state[first]["exp_avg"], silent.state[first]["exp_avg"]
    assert not torch.equal(theirs, mine)
    by_name, _ = AdamW().build(swapped, num_steps=10)
    load_by_name(by_name)
    by_name.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(theirs, by_name.state[first]["exp_avg"])


def test_groups_may_be_cut_otherwise_and_settings_follow_the_names() -> None:
    named, optimizer = trained()
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.5
    single = torch.optim.AdamW(list(named.items()), lr=1.0)
    load_by_name(single)
    single.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert single.param_groups[0]["lr"] == 0.5
    assert single.param_groups[0]["weight_decay"] == 0.1
    assert all(
        torch.equal(single.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])
        for p in named.values()
    )
    optimizer.param_groups[1]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"other settings for 'layers\.1.*one group here"):
        single.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_what_never_trained_stays_without_moments() -> None:
    named = parameters()
    optimizer, _ = AdamW().build(named, num_steps=10)
    some = {name: p for name, p in named.items() if name.startswith(SITES[1])}
    step(optimizer, some, seed=0)
    other = parameters(seed=1)
    right, _ = AdamW().build(reordered(other), num_steps=10)
    load_by_name(right)
    right.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {name for name, p in other.items() if p in right.state} == some.keys()


def without(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: p for name, p in named.items() if name.startswith(SITES[0])}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"lacks 'layers\.1\.up\.lora_A\.default\.weight' \(2 parameters"),
        ("unknown", r"has 'layers\.1\.up\.lora_A\.default\.weight'.*does not train"),
        (
            "shape",
            r"exp_avg of 'layers\.0\.up\.lora_A\.default\.weight' has shape \[2, 3\].*\[4, 3",
        ),
        ("unnamed", "has no parameter names"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(kind: str, message: str) -> None:
    named, optimizer = trained()
    saved, target = copy.deepcopy(optimizer.state_dict()), parameters()
    if kind == "missing":
        optimizer, _ = AdamW().build(without(named), num_steps=10)
        saved = optimizer.state_dict()
    elif kind == "unknown":
        target = without(target)
    elif kind == "shape":
        target = parameters(rank=4)
    else:
        saved = torch.optim.AdamW(list(named.values())).state_dict()
    own, _ = AdamW().build(target, num_steps=10)
    load_by_name(own)
    with pytest.raises(ValueError, match=message):
        own.load_state_dict(saved)
    assert not own.state


def test_an_optimizer_without_names_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"\(name, parameter\) pairs"):
        load_by_name(torch.optim.AdamW(list(parameters().values())))


def test_a_snapshot_goes_back_bit_for_bit() -> None:
    named, optimizer = trained()
    weights = {name: p.detach().clone() for name, p in named.items()}
    snapshot = state_by_name(optimizer, named)
    step(optimizer, named, seed=20)
    after = {name: p.detach().clone() for name, p in named.items()}
    optimizer.state.pop(named[f"{SITES[0]}.lora_A.default.weight"])  # as a switch does
    load_state_by_name(optimizer, named, snapshot)
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(weights[name])
    step(optimizer, named, seed=20)
    assert_same(after, dict(named))
    assert int(next(iter(snapshot.values()))["step"]) == 3  # a copy, not a view


def test_a_snapshot_without_moments_clears_them() -> None:
    named = parameters()
    optimizer, _ = AdamW().build(named, num_steps=10)
    empty = state_by_name(optimizer, named)
    assert set(map(len, empty.values())) == {0}
    step(optimizer, named, seed=0)
    load_state_by_name(optimizer, named, empty)
    assert not optimizer.state


def test_a_snapshot_that_does_not_fit_changes_nothing() -> None:
    named, optimizer = trained()
    snapshot = state_by_name(optimizer, named)
    bad: dict[str, Any] = dict(snapshot)
    bad[f"{SITES[1]}.lora_B.default.weight"] = {"exp_avg": torch.zeros(5, 5)}
    for states, message in (
        (bad, r"exp_avg of 'layers\.1\.up\.lora_B"),
        ({}, r"lacks 'layers\.0\.up\.lora_A\.default\.weight' \(4"),
    ):
        with pytest.raises(ValueError, match=message):
            load_state_by_name(optimizer, named, states)
    for name, state in state_by_name(optimizer, named).items():
        assert_same(state, snapshot[name])
    with pytest.raises(ValueError, match="does not hold 'stranger'"):
        state_by_name(optimizer, {"stranger": nn.Parameter(torch.zeros(1))})


# --- how AdamW is built ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_a_group_for_each_linear_updates_as_one_group_does(max_grad_norm: float | None) -> None:
    settings = AdamW(learning_rate=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    many, one = parameters(), parameters()
    by_site, schedule = settings.build(many, num_steps=8)
    single = torch.optim.AdamW(
        list(one.values()), lr=0.01, betas=settings.betas, eps=settings.epsilon, weight_decay=0.1
    )
    assert [g["param_names"] for g in by_site.param_groups] == [
        [f"{site}.lora_{side}.default.weight" for side in "AB"] for site in SITES
    ]
    for i in range(8):
        for optimizer, named in ((by_site, many), (single, one)):
            for j, p in enumerate(named.values()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + j))
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(named.values(), max_grad_norm)
            single.param_groups[0]["lr"] = schedule.get_last_lr()[0]
            optimizer.step()
        schedule.step()
        assert_same(dict(many), dict(one))


def test_all_weights_of_a_model_are_one_group_with_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer, _ = AdamW().build(dict(model.named_parameters()), num_steps=1)
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["0.weight", "0.bias", "1.weight", "1.bias"]
    ]
