from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tropism.lora.placement import Placement, initial_plan
from tropism.lora.plan import Plan, SitePlan
from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.models import LoRA, Model, load_policy
from tropism.optimization import AdamW
from tropism.policy import Policy

R = 4
LR = 0.125
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(5))
Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(6))


class Stack(nn.Module):
    """Three linears, two of them in layers, the last without an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(6, 6)}) for _ in range(2)])
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer["up"](x))  # type: ignore[index]
        return self.out(x)  # type: ignore[no-any-return]


class Rig:
    """A small model under placement, stepped as the trainer does."""

    def __init__(self, *, weight_decay: float = 0.0, warmup_steps: int = 4, seed: int = 0) -> None:
        torch.manual_seed(seed)
        base = Stack()
        self.sites = name_sites([n for n, m in base.named_modules() if isinstance(m, nn.Linear)])
        config = LoraConfig(r=R, lora_alpha=8, target_modules=["up"])
        self.model = get_peft_model(base, config)  # type: ignore[arg-type]
        self.base: Any = self.model.get_base_model()
        self.placement = Placement(self.sites, self.layer_of, max_rank=R, warmup_steps=warmup_steps)
        named = {n: p for n, p in self.model.named_parameters() if "lora_" in n}
        settings = AdamW(learning_rate=LR, weight_decay=weight_decay, max_grad_norm=None)
        self.optimizer, self.scheduler = settings.build(named, num_steps=100)

    def layer_of(self, site: LinearSite) -> LoraLayer | None:
        layer = self.base.get_submodule(site.name)
        return layer if isinstance(layer, LoraLayer) else None

    def factors(self, layer: int) -> tuple[nn.Parameter, nn.Parameter]:
        adapted = self.base.layers[layer]["up"]
        return adapted.lora_A["default"].weight, adapted.lora_B["default"].weight

    def plan(self, **changes: dict[str, Any]) -> Plan:
        """The plan in force with entries changed: up0=..., up1=..."""
        entries = list(self.placement.plan)
        for name, fields in changes.items():
            index = int(name[2:])
            entries[index] = replace(entries[index], **fields)
        return tuple(entries)

    def apply(self, **changes: dict[str, Any]) -> Any:
        return self.placement.apply(self.plan(**changes), self.optimizer)

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (self.model(X) - Y).square().sum().backward()

    def step(self, gradient: Tensor | None = None) -> None:
        """One step on the loss; ``gradient`` fills the gradients of all that trains instead."""
        self.backward()
        if gradient is not None:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = gradient.expand_as(parameter).clone()
        self.placement.mask_gradients()
        self.placement.scale_learning_rates(self.optimizer, self.scheduler.get_last_lr()[0])
        self.optimizer.step()
        self.placement.after_step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def outputs(self) -> Tensor:
        with torch.no_grad():
            return self.model(X)  # type: ignore[no-any-return]


TRAIN = {"state": "TRAIN", "rank": R}
KEEP = {"state": "KEEP", "rank": 0}
OFF = {"state": "OFF", "rank": 0}


# --- what a plan does to the model ----------------------------------------------------------------


def test_everything_that_has_an_adapter_trains_at_first() -> None:
    rig = Rig()
    assert [(e.key, e.state, e.rank, e.lr_scale) for e in rig.placement.plan] == [
        ("0.up", "TRAIN", 4, 1.0),
        ("1.up", "TRAIN", 4, 1.0),
        ("out", "OFF", 0, 1.0),
    ]
    assert rig.placement.plan == initial_plan(rig.sites, rig.layer_of, R)
    assert rig.placement.num_trainable() == 2 * R * (6 + 6)
    rig.placement.check()


def test_what_each_state_means() -> None:
    rig = Rig()
    change = rig.apply(up0=OFF, up1={"rank": 3})
    assert (change.entered, change.left, change.states) == ((), ("0.up",), ("0.up",))
    assert (change.ranks, change.lr_scales, change.jaccard) == (("1.up",), (), 0.5)
    assert rig.placement.num_trainable() == 3 * 12
    off, train = rig.base.layers[0]["up"], rig.base.layers[1]["up"]
    assert off.active_adapters == []
    assert train.active_adapters == ["default"]
    assert [p.requires_grad for p in (*rig.factors(0), *rig.factors(1))] == [False] * 2 + [True] * 2
    calls = []
    off.lora_A["default"].register_forward_hook(lambda *_: calls.append("off"))
    train.lora_A["default"].register_forward_hook(lambda *_: calls.append("train"))
    rig.step()
    assert calls == ["train"]  # no adapter compute where it is OFF
    rig.apply(up1=KEEP)
    assert [p.requires_grad for p in rig.factors(1)] == [False] * 2
    assert train.active_adapters == ["default"]
    assert not rig.apply()
    assert rig.apply().jaccard == 1.0  # nothing trains in either


def test_no_gradient_flows_where_nothing_trains() -> None:
    rig = Rig()
    rig.step()
    rig.apply(up0=KEEP)
    before = [p.clone() for p in rig.factors(0)]
    rig.backward()
    assert [p.grad is None for p in (*rig.factors(0), *rig.factors(1))] == [True] * 2 + [False] * 2
    rig.step()
    assert all(torch.equal(a, b) for a, b in zip(before, rig.factors(0), strict=True))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"up0": {"rank": 5}}, r"0\.up is TRAIN with rank 5; TRAIN needs 1 to 4"),
        ({"up0": {"rank": 0}}, r"0\.up is TRAIN with rank 0"),
        ({"up1": {"state": "KEEP"}}, r"1\.up is KEEP with rank 4"),
        ({"up1": {"lr_scale": 0.0}}, r"1\.up has lr_scale=0\.0"),
        ({"up1": {"lr_scale": float("inf")}}, r"lr_scale=inf"),
        ({"up1": {"state": "ON"}}, r"1\.up has state 'ON'"),
        ({"up2": TRAIN}, r"out is TRAIN, and carries no adapter"),
        ({"up0": {"layer": 1}, "up1": {"layer": 0}}, r"entry 0 is '1\.up'.*'0\.up'"),
        ({"up0": {"lr_scale": 0.5}, "up1": OFF}, r"OFF for 'layers\.1\.up', whose B is not 0"),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(entries: dict[str, Any], message: str) -> None:
    rig = Rig()
    rig.step()
    plan, saved = rig.placement.plan, copy.deepcopy(rig.optimizer.state_dict())
    state, flags = rig.placement.state_dict(), [p.requires_grad for p in rig.model.parameters()]
    with pytest.raises(ValueError, match=message):
        rig.apply(**entries)
    assert rig.placement.plan is plan
    assert rig.placement.state_dict() == state
    assert [p.requires_grad for p in rig.model.parameters()] == flags
    now = rig.optimizer.state_dict()
    assert now["param_groups"] == saved["param_groups"]
    for number, moments in saved["state"].items():
        assert all(torch.equal(now["state"][number][k], v) for k, v in moments.items())
    rig.placement.check()


def test_a_plan_of_another_length_and_an_unknown_reset() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="2 entries for the model's 3 linears"):
        rig.placement.apply(rig.placement.plan[:2], rig.optimizer)
    with pytest.raises(ValueError, match=r"reset=\['out'\]"):
        rig.placement.apply(rig.placement.plan, rig.optimizer, reset=["out"])


def test_off_becomes_keep_where_b_is_not_zero() -> None:
    rig = Rig()
    rig.apply(up0=OFF)
    rig.step()
    wanted = rig.plan(up1=OFF)
    assert [e.state for e in rig.placement.feasible(wanted)] == ["OFF", "KEEP", "OFF"]
    rig.placement.apply(rig.placement.feasible(wanted), rig.optimizer)


def test_a_switch_needs_a_clean_slate() -> None:
    rig = Rig()
    rig.backward()
    with pytest.raises(RuntimeError, match=r"'layers\.0\.up' has a gradient.*set_to_none=True"):
        rig.apply(up0=KEEP)
    with pytest.raises(RuntimeError, match="has a gradient"):
        rig.placement.truncate(rig.sites[0])


def test_adapters_of_another_rank_are_refused() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=r"'layers\.0\.up' has rank 4, the others 8"):
        Placement(rig.sites, rig.layer_of, max_rank=8)


# --- AdamW, by hand -------------------------------------------------------------------------------


def test_the_first_step_after_entry_is_warmed_up_lr_times_sign() -> None:
    rig = Rig(warmup_steps=4)
    rig.apply(up1=OFF)
    for _ in range(3):
        rig.step()
    rig.apply(up0=KEEP, up1=TRAIN)
    for step in range(6):
        _, b = rig.factors(1)
        before = b.detach().clone()
        rig.step(torch.tensor(-3.0))
        # Equal gradients: each AdamW step is lr * sign(g) exactly, but for epsilon.
        expected = LR * min(1.0, (step + 1) / 4)
        torch.testing.assert_close(b - before, torch.full_like(b, expected), rtol=1e-5, atol=0)


def test_no_warm_up_at_the_start_of_a_run() -> None:
    rig = Rig(warmup_steps=4)
    rig.apply(up1=OFF)
    rig.apply(up1=TRAIN)  # still before the first step
    rig.step(torch.tensor(2.0))
    for layer in range(2):
        _, b = rig.factors(layer)
        torch.testing.assert_close(b, torch.full_like(b, -LR), rtol=1e-5, atol=0)


def test_reentry_forgets_the_moments() -> None:
    rig = Rig(warmup_steps=0)
    for _ in range(5):
        rig.step(torch.tensor(4.0))
    rig.apply(up1=KEEP)
    assert [p in rig.optimizer.state for p in rig.factors(1)] == [False, False]
    rig.step()
    rig.apply(up1=TRAIN)
    _, b = rig.factors(1)
    before = b.detach().clone()
    rig.step(torch.tensor(-1e-3))  # old momentum would go the other way
    torch.testing.assert_close(b - before, torch.full_like(b, LR), rtol=1e-4, atol=0)
    assert rig.optimizer.state[b]["step"] == 1


def test_lr_scale_halves_the_step_exactly() -> None:
    steps = []
    for scale in (1.0, 0.5):
        rig = Rig()
        rig.apply(up0={"lr_scale": scale})
        rig.step()
        steps.append([p.detach().clone() for layer in range(2) for p in rig.factors(layer)])
    (_, b0, a1, b1), (_, half_b0, other_a1, other_b1) = steps
    assert torch.equal(0.5 * b0, half_b0)  # from 0, so that the step is what is there
    assert torch.equal(a1, other_a1)
    assert torch.equal(b1, other_b1)
    assert b0.any()
    assert not torch.equal(b0, b1)


def test_learning_rates_follow_schedule_plan_and_warm_up() -> None:
    rig = Rig(warmup_steps=2)
    rig.step()
    rig.apply(up0=KEEP)
    rig.step()
    rig.apply(up0={**TRAIN, "lr_scale": 0.5}, up1={"lr_scale": 2.0})
    seen = []
    for base_lr in (1.0, 10.0, 100.0):
        rig.backward()
        rig.placement.mask_gradients()
        rig.placement.scale_learning_rates(rig.optimizer, base_lr)
        seen.append([group["lr"] for group in rig.optimizer.param_groups])
        rig.optimizer.step()
        rig.placement.after_step()
        rig.scheduler.step()
        assert {group["lr"] for group in rig.optimizer.param_groups} == {LR}  # the schedule's again
    assert seen == [[0.25, 2.0], [5.0, 20.0], [50.0, 200.0]]


def test_groups_that_mix_modules_are_refused() -> None:
    rig = Rig()
    mixed = torch.optim.AdamW([p for layer in range(2) for p in rig.factors(layer)])
    with pytest.raises(ValueError, match=r"A and B of 'layers\.0\.up' alone"):
        rig.placement.scale_learning_rates(mixed, 1.0)


# --- ranks ----------------------------------------------------------------------------------------


def moments(rig: Rig, layer: int) -> list[Tensor]:
    a, b = rig.factors(layer)
    return [
        tensor
        for name in ("exp_avg", "exp_avg_sq")
        for tensor in (rig.optimizer.state[a][name], rig.optimizer.state[b][name].T)
    ]


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_components_beyond_the_rank_stand_still_bit_for_bit(weight_decay: float) -> None:
    rig = Rig(weight_decay=weight_decay)
    for _ in range(3):
        rig.step()
    rig.apply(up0={"rank": 2})
    assert all(not m[2:].any() and m[:2].any() for m in moments(rig, 0))
    a, b = (p.detach().clone() for p in rig.factors(0))
    for _ in range(4):
        rig.step()
    now_a, now_b = rig.factors(0)
    assert torch.equal(now_a[2:], a[2:])
    assert torch.equal(now_b[:, 2:], b[:, 2:])
    assert not torch.isclose(now_a[:2], a[:2]).any()
    assert all(not m[2:].any() for m in moments(rig, 0))


def test_frozen_components_do_not_count_for_clipping() -> None:
    rig = Rig()
    rig.apply(up0={"rank": 1})
    rig.backward()
    rig.placement.mask_gradients()
    a, b = (p.grad for p in rig.factors(0))
    assert a is not None
    assert b is not None
    assert not a[1:].any()
    assert not b[:, 1:].any()
    assert b[:, 0].all()


def test_a_step_of_momentum_alone_moves_no_frozen_component() -> None:
    rig = Rig()
    for _ in range(3):
        rig.step()
    rig.apply(up0={"rank": 2})
    a, b = (p.detach().clone() for p in rig.factors(0))
    rig.step(torch.tensor(0.0))
    now_a, now_b = rig.factors(0)
    assert torch.equal(now_a[2:], a[2:])
    assert torch.equal(now_b[:, 2:], b[:, 2:])
    assert (now_a[:2] != a[:2]).all()  # what trains goes on


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_a_new_component_moves_as_fresh_adamw_would_move_it(weight_decay: float) -> None:
    """Also though the module has counted many steps, which AdamW's correction goes by."""
    rig = Rig(weight_decay=weight_decay, warmup_steps=4)
    rig.apply(up0={"rank": 2})
    for _ in range(50):
        rig.step()
    assert rig.apply(up0={"rank": 3}).ranks == ("0.up",)
    assert all(m[:2].any() and not m[2:].any() for m in moments(rig, 0))
    a, b = rig.factors(0)
    assert not b[:, 2:].any()  # it never trained
    fresh = [p.detach().clone().requires_grad_() for p in (a[2], b[:, 2])]
    reference = torch.optim.AdamW(fresh, weight_decay=weight_decay)
    for step in range(8):
        rig.backward()
        assert a.grad is not None
        assert b.grad is not None
        fresh[0].grad, fresh[1].grad = a.grad[2].clone(), b.grad[:, 2].clone()
        reference.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 4)
        reference.step()
        rig.step()
        torch.testing.assert_close(a[2], fresh[0].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b[:, 2], fresh[1].detach(), rtol=1e-5, atol=1e-6)
        assert not b[:, 3].any()


def test_the_first_step_of_a_new_component_by_hand() -> None:
    rig = Rig(warmup_steps=0)
    rig.apply(up0={"rank": 2})
    for _ in range(50):
        rig.step(torch.tensor(1.0))
    rig.apply(up0={"rank": 4})
    rig.step(torch.tensor(-1e-2))
    _, b = rig.factors(0)
    torch.testing.assert_close(b[:, 2:], torch.full((6, 2), LR), rtol=1e-4, atol=0)


def test_a_component_that_trains_again_starts_from_where_it_stopped() -> None:
    rig = Rig(warmup_steps=0)
    for _ in range(3):
        rig.step()
    rig.apply(up0={"rank": 2})
    rig.step()
    rig.apply(up0={"rank": 4})
    _, b = rig.factors(0)
    before = b.detach().clone()
    assert before[:, 2:].all()
    rig.step(torch.tensor(1e-2))
    torch.testing.assert_close(b[:, 2:], before[:, 2:] - LR, rtol=1e-4, atol=1e-6)


def test_a_step_out_of_order_is_an_error() -> None:
    rig = Rig()
    rig.backward()
    rig.optimizer.step()
    with pytest.raises(RuntimeError, match="needs mask_gradients"):
        rig.placement.after_step()


# --- controls -------------------------------------------------------------------------------------


def test_reset_restarts_a_module_that_trains_on() -> None:
    rig = Rig(warmup_steps=4)
    for _ in range(3):
        rig.step(torch.tensor(4.0))
    change = rig.placement.apply(rig.placement.plan, rig.optimizer, reset=["1.up"])
    assert (bool(change), change.restarted, change.jaccard) == (True, ("1.up",), 1.0)
    _, b = rig.factors(1)
    before = b.detach().clone()
    rig.step(torch.tensor(-2.0))
    torch.testing.assert_close(b - before, torch.full_like(b, LR / 4), rtol=1e-4, atol=0)


def test_truncation_says_how_far_the_weight_jumps() -> None:
    rig = Rig()
    for _ in range(3):
        rig.step()
    adapted = rig.base.layers[0]["up"]
    weight = adapted.base_layer.weight.detach()
    before = weight + adapted.get_delta_weight("default").detach()
    rig.apply(up0={"rank": 1})
    change = rig.placement.truncate(rig.sites[0])
    after = weight + adapted.get_delta_weight("default").detach()
    expected = float((after - before).norm() / before.norm())
    assert expected > 0.01
    assert change == pytest.approx(expected, rel=1e-5)
    assert not rig.factors(0)[1][:, 1:].any()
    assert rig.placement.truncate(rig.sites[0]) == 0.0


def test_another_a_where_b_is_zero_changes_nothing_yet() -> None:
    rig = Rig()
    rig.apply(up1=OFF)
    rig.step()
    before = rig.outputs()
    rows = torch.eye(6)[:2]
    rig.placement.reenter_on(rig.sites[1], rows)
    rig.apply(up1=TRAIN)
    a, _ = rig.factors(1)
    assert torch.equal(a[:2], rows)
    assert (rig.outputs() - before).abs().max() == 0.0
    with pytest.raises(ValueError, match=r"A is \[4, 6\], the new rows are \[5, 6\]"):
        rig.placement.reenter_on(rig.sites[1], torch.zeros(5, 6))
    with pytest.raises(ValueError, match="not finite"):
        rig.placement.reenter_on(rig.sites[1], torch.full((1, 6), float("nan")))
    with pytest.raises(ValueError, match=r"'layers\.0\.up'.*B is not 0"):
        rig.placement.reenter_on(rig.sites[0], rows)
    with pytest.raises(ValueError, match="'out' carries no adapter"):
        rig.placement.reenter_on(rig.sites[2], rows)


# --- what PEFT does behind one's back -------------------------------------------------------------


def toggled(rig: Rig, how: str) -> None:
    if how == "set_adapter":
        rig.model.set_adapter("default")
    elif how == "disable_adapter":
        with rig.model.disable_adapter():
            pass
    elif how == "add_adapter":
        rig.model.add_adapter("other", LoraConfig(r=2, target_modules=["up"]))
        rig.model.set_adapter("other")
    elif how == "disable_layers":
        rig.model.base_model.disable_adapter_layers()


@pytest.mark.parametrize("how", ["set_adapter", "disable_adapter", "add_adapter", "disable_layers"])
def test_the_plan_is_reasserted_after_peft_toggled_it(how: str) -> None:
    rig = Rig()
    rig.apply(up0=OFF)
    rig.step()
    rig.apply(up1=KEEP)
    before = rig.outputs()
    rig.placement.check()
    toggled(rig, how)
    with pytest.raises(RuntimeError, match=r"the plan says .* 'layers\.\d\.up'.*reassert"):
        rig.placement.check()
    rig.placement.reassert()
    rig.placement.check()
    assert rig.base.layers[0]["up"].active_adapters == []
    assert not any(p.requires_grad for n, p in rig.model.named_parameters() if "default" in n)
    assert torch.equal(rig.outputs(), before)


def test_check_sees_weights_written_where_the_plan_is_off_and_a_merged_base() -> None:
    rig = Rig()
    rig.apply(up0=OFF)
    with torch.no_grad():
        rig.factors(0)[1][2, 3] = 1.0
    with pytest.raises(RuntimeError, match=r"OFF for 'layers\.0\.up', whose B is not 0"):
        rig.placement.check()
    rig = Rig()
    rig.model.merge_adapter()
    with pytest.raises(RuntimeError, match="merged into its base"):
        rig.placement.check()


# --- resume ---------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_same_run() -> None:
    def first(rig: Rig) -> None:
        rig.apply(up0={"rank": 2}, up1=OFF)
        for _ in range(3):
            rig.step()
        rig.apply(up0={"rank": 3, "lr_scale": 0.5}, up1={**TRAIN, "rank": 1})
        rig.step()  # in the middle of both warm-ups

    def second(rig: Rig) -> None:
        for _ in range(2):
            rig.step()
        rig.apply(up0={"rank": 4}, up1=KEEP)
        for _ in range(3):
            rig.step()

    whole, half, resumed = Rig(weight_decay=0.1), Rig(weight_decay=0.1), Rig(weight_decay=0.1)
    first(whole)
    first(half)
    saved = copy.deepcopy(
        [half.placement.state_dict(), half.model.state_dict(), half.optimizer.state_dict()]
    )
    resumed.placement.load_state_dict(saved[0])
    resumed.model.load_state_dict(saved[1])
    resumed.optimizer.load_state_dict(saved[2])
    resumed.placement.check()
    assert resumed.placement.plan == half.placement.plan
    second(whole)
    second(resumed)
    assert resumed.placement.state_dict() == whole.placement.state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    a, b = whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"]
    assert a.keys() == b.keys()
    assert all(torch.equal(a[i][key], b[i][key]) for i in a for key in a[i])


def test_a_loaded_plan_is_in_force_at_once() -> None:
    rig, resumed = Rig(), Rig()
    rig.apply(up0=OFF, up1=KEEP)
    resumed.placement.load_state_dict(rig.placement.state_dict())
    resumed.placement.check()
    assert resumed.base.layers[0]["up"].active_adapters == []
    assert not any(p.requires_grad for layer in range(2) for p in resumed.factors(layer))


def test_state_of_another_model_is_refused() -> None:
    rig = Rig()
    state = rig.placement.state_dict()
    state["plan"] = state["plan"][1:]
    with pytest.raises(ValueError, match="2 entries"):
        rig.placement.load_state_dict(state)


# --- the logits of a real model -------------------------------------------------------------------


def organism_placement(dtype: Any) -> tuple[Policy, Placement]:
    torch.manual_seed(0)
    policy = load_policy(Model("organism", dtype=dtype), LoRA(rank=R, alpha=8))

    def layer_of(site: LinearSite) -> LoraLayer | None:
        layer = policy.base.get_submodule(site.name)
        return layer if isinstance(layer, LoraLayer) else None

    return policy, Placement(policy.sites, layer_of, max_rank=R)


IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))


def train(policy: Policy, placement: Placement, optimizer: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        policy.model(input_ids=IDS, labels=IDS).loss.backward()
        placement.mask_gradients()
        placement.scale_learning_rates(optimizer, 1e-2)
        optimizer.step()
        placement.after_step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_switch_moves_logits_or_reference(dtype: str) -> None:
    policy, placement = organism_placement(dtype)
    optimizer, _ = AdamW(weight_decay=0.1).build(policy.named_trainable(), num_steps=100)

    def logits() -> list[Tensor]:
        with torch.no_grad():
            found = [policy.model(input_ids=IDS).logits]
            with policy.reference():
                found.append(policy.model(input_ids=IDS).logits)
            with policy.merged():
                found.append(policy.model(input_ids=IDS).logits)
        return found

    def switch(where: slice, **fields: Any) -> None:
        before = logits()
        entries: list[SitePlan] = list(placement.plan)
        entries[where] = [replace(entry, **fields) for entry in entries[where]]
        assert placement.apply(tuple(entries), optimizer)
        for old, new in zip(before, logits(), strict=True):
            assert (old - new).abs().max().item() == 0.0
        placement.check()
        assert torch.equal(before[1], start)  # the reference stays the starting policy
        train(policy, placement, optimizer, 2)
        assert not torch.equal(logits()[0], before[0])

    start = logits()[0]
    switch(slice(0, 42), **OFF)  # TRAIN -> OFF, never trained
    switch(slice(0, 21), **TRAIN)  # OFF -> TRAIN
    switch(slice(0, 7), **KEEP)  # TRAIN -> KEEP
    switch(slice(21, 28), **KEEP)  # OFF -> KEEP
    switch(slice(0, 5), **TRAIN)  # KEEP -> TRAIN
    policy.keep_reference()
    start = logits()[0]
    switch(slice(60, 84), rank=2)  # rank down
    switch(slice(60, 70), rank=3)  # rank up, trained before
    switch(slice(28, 35), **{**TRAIN, "rank": 1})  # OFF -> TRAIN at a smaller rank
    switch(slice(28, 35), rank=4)  # rank up, never trained
    switch(slice(50, 84), lr_scale=0.25)
