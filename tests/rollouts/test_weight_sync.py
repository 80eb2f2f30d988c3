"""What an engine is sent: whatever moved, in whole groups, from a base that is only read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tropism.lora.export import load_adapter_tensors
from tropism.lora.placement import Placement
from tropism.lora.plan import SitePlan
from tropism.measurements.layer_names import name_sites
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts.adapter_folders import AdapterFolders
from tropism.rollouts.weight_sync import Group, Update, WeightSync, groups_of

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def loaded(lora: LoRA | None = LoRA(rank=4, alpha=8), **model) -> Policy:
    torch.manual_seed(0)
    return load_policy(Model(name="organism", **{"dtype": "float32", **model}), lora)


@pytest.fixture
def policy() -> Policy:
    return loaded()


def account(policy: Policy, **options) -> WeightSync:
    return WeightSync(policy, packed=PACKED, **{"dtype": torch.float32, **options})


def move(policy: Policy, modules: set[str], *, layer: int | None = 0, by: float = 0.1) -> None:
    with torch.no_grad():
        for site in policy.sites:
            if site.module in modules and layer in (None, site.layer):
                policy.adapter(site).b.add_(by)


def take(weights: WeightSync) -> Update | None:
    update = weights.pending()
    if update is not None:
        weights.delivered(update)
    return update


def test_linears_come_in_the_engines_groups_and_order():
    sites = name_sites(
        [f"{ATTENTION}.{n}_proj" for n in "vkqo"] + [f"{MLP}.{n}_proj" for n in ("up", "gate")]
    )
    groups = {group.name: [s.module for s in group.sites] for group in groups_of(sites, PACKED)}
    assert groups == {
        f"{ATTENTION}.qkv_proj": ["q_proj", "k_proj", "v_proj"],
        f"{ATTENTION}.o_proj": ["o_proj"],
        f"{MLP}.gate_up_proj": ["gate_proj", "up_proj"],
    }
    assert len(groups_of(sites, {})) == 6


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("modules", "sent"),
    [
        ({"k_proj"}, [f"{ATTENTION}.{n}_proj.weight" for n in "qkv"]),
        ({"gate_proj"}, [f"{MLP}.{n}_proj.weight" for n in ("gate", "up")]),
        ({"o_proj", "down_proj"}, [f"{ATTENTION}.o_proj.weight", f"{MLP}.down_proj.weight"]),
    ],
)
def test_only_what_moved_is_sent_and_its_whole_group_with_it(policy, modules, sent):
    weights = account(policy)
    assert weights.pending() is None  # B is 0: the engine's base is the policy
    move(policy, modules)
    update = weights.pending()
    assert weights.names(update) == sent
    tensors = dict(weights.tensors(update))
    assert list(tensors) == sent
    weights.require_whole(sent)
    with policy.merged():
        for name, tensor in tensors.items():
            expected = policy.linear(
                next(s for s in policy.sites if name.startswith(s.name))
            ).weight.detach()
            assert torch.equal(tensor, expected), name
    assert weights.pending() is not None  # not delivered yet
    weights.delivered(update)
    assert weights.pending() is None


@pytest.mark.fault(16)
def test_a_part_of_a_group_is_never_sent(policy):
    weights = account(policy)
    whole = [f"{ATTENTION}.{n}_proj.weight" for n in "qkv"]
    for missing in whole:
        with pytest.raises(RuntimeError, match=rf"qkv_proj' without \['{missing}'\]"):
            weights.require_whole([name for name in whole if name != missing])
    weights.require_whole([f"{ATTENTION}.o_proj.weight"])


@pytest.mark.fault(16)
def test_biases_belong_to_their_group(policy):
    sites = [s for s in policy.sites if s.name.startswith(ATTENTION) and s.module != "o_proj"]
    for site in sites:
        linear = policy.linear(site)
        linear.bias = nn.Parameter(torch.ones(linear.weight.shape[0]), requires_grad=False)
    weights = account(policy)
    move(policy, {"k_proj"})
    names = weights.names(weights.pending())
    assert len(names) == 6
    weights.require_whole(names)
    with pytest.raises(RuntimeError, match="bias"):
        weights.require_whole([name for name in names if name.endswith("weight")])


@pytest.mark.fault(15)
def test_an_engine_that_starts_late_is_sent_the_adapter_that_the_run_starts_from(tmp_path):
    first = loaded(dtype="float32")
    move(first, {"q_proj"}, by=0.5)
    first.export(tmp_path)
    policy = loaded(adapter=str(tmp_path / "adapter"))
    update = account(policy).pending()
    assert [group.name for group in update.groups] == [f"{ATTENTION}.qkv_proj"]
    q = next(s for s in policy.sites if s.name == f"{ATTENTION}.q_proj")
    adapter = policy.adapter(q)
    expected = policy.weight(q) + adapter.scaling * adapter.b @ adapter.a
    torch.testing.assert_close(dict(account(policy).tensors(update))[f"{q.name}.weight"], expected)


@pytest.mark.fault(15)
def test_every_way_of_moving_an_adapter_is_seen_without_being_told(policy):
    weights = account(policy)
    move(policy, {"q_proj"})
    assert take(weights) is not None
    q = next(s for s in policy.sites if s.name == f"{ATTENTION}.q_proj")
    adapter = policy.adapter(q)
    adapter.b.data = adapter.b.data * 2  # other data in its place, as a view shows it
    assert take(weights) is not None
    with policy.starting():
        assert [g.name for g in take(weights).groups] == [f"{ATTENTION}.qkv_proj"]
        assert weights.pending() is None
    assert take(weights) is not None  # and back
    policy.lora_layer(q)._disable_adapters = True
    update = take(weights)
    assert torch.equal(dict(weights.tensors(update))[f"{q.name}.weight"], policy.weight(q))


def test_a_linear_that_goes_off_falls_back_to_its_base_and_keep_stays(policy):
    """AdaLoRA's control zeroes B and turns the linear off; KEEP goes on in the forward."""
    placement = Placement(policy.sites, policy.lora_layer, max_rank=4)
    weights = account(policy)
    move(policy, {"k_proj", "down_proj"})
    take(weights)
    with torch.no_grad():
        k = next(s for s in policy.sites if s.name == f"{ATTENTION}.k_proj")
        policy.adapter(k).b.zero_()
    off = {("k_proj", 0): "OFF", ("down_proj", 0): "KEEP"}
    plan = tuple(
        SitePlan(e.layer, e.module, state, 0)
        if (state := off.get((e.module, e.layer))) is not None
        else e
        for e in placement.plan
    )
    placement.apply(plan, None)
    update = take(weights)
    assert [group.name for group in update.groups] == [f"{ATTENTION}.qkv_proj"]
    sent = dict(weights.tensors(update))
    assert torch.equal(sent[f"{k.name}.weight"], policy.weight(k))
    assert weights.pending() is None


@pytest.mark.fault(14)
def test_twenty_syncs_in_bf16_move_no_byte_of_the_base():
    policy = loaded(dtype="bfloat16")

    def digest() -> str:
        whole = hashlib.sha256()
        for name, parameter in policy.base.named_parameters():
            if "lora_" not in name:
                whole.update(parameter.detach().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    weights, before = account(policy, dtype=torch.bfloat16), digest()
    first: dict[str, torch.Tensor] = {}
    for step in range(20):
        move(policy, {"q_proj", "up_proj"}, layer=None, by=0.01 * (-1) ** step)
        sent = dict(weights.tensors(weights.pending()))
        if step == 0:
            first = {name: tensor.clone() for name, tensor in sent.items()}
        elif step == 18:  # the same adapter again, but for the rounding of fp32 sums
            for name, tensor in sent.items():
                torch.testing.assert_close(tensor, first[name], rtol=1e-2, atol=1e-3)
        weights.delivered(weights.pending())
    assert digest() == before


def test_an_engine_without_weights_is_sent_every_parameter_once(policy):
    weights = account(policy, has_base=False)
    names = weights.names(weights.pending())
    expected = {
        name.replace(".base_layer", "")
        for name, _ in policy.base.named_parameters()
        if "lora_" not in name
    }
    assert len(names) == len(set(names))
    assert set(names) == expected
    take(weights)
    assert weights.pending() is None
    weights.forget()
    assert weights.names(weights.pending()) == names


@pytest.mark.fault(15)
def test_without_lora_everything_is_sent_when_anything_moved():
    policy = loaded(None)
    weights = account(policy)
    assert set(weights.names(take(weights))) == dict(policy.base.named_parameters()).keys()
    assert weights.pending() is None
    weights.moved()
    assert take(weights) is not None
    with torch.no_grad():
        next(policy.base.parameters()).add_(1.0)
    assert take(weights) is not None
    next(policy.base.parameters()).data = next(policy.base.parameters()).data.clone()
    assert take(weights) is not None
    assert weights.pending() is None


def test_adapters_travel_in_a_new_folder_each_time_scaling_folded_in(policy):
    weights, folders = account(policy), AdapterFolders()
    assert weights.adapters() == {}
    move(policy, {"k_proj"})
    versions: list[tuple[int, object]] = []
    for _ in range(2):
        version, folder = folders.write(policy, weights.adapters())
        versions.append((version, folder))
    assert [version for version, _ in versions] == [1, 2]
    assert not versions[0][1].exists()
    _, written = load_adapter_tensors(versions[1][1])
    k = next(s for s in policy.sites if s.name == f"{ATTENTION}.k_proj")
    assert written.keys() == {k.name}
    a, b, scaling = written[k.name]
    assert scaling == 1
    assert torch.equal(a, policy.adapter(k).a.detach())
    assert torch.equal(b, 2 * policy.adapter(k).b.detach())


@pytest.mark.parametrize("module", ["k_proj", "down_proj"])
def test_what_a_module_must_answer_is_the_product_with_what_was_sent(policy, module):
    from tropism.rollouts.engine_probe import probe

    weights = account(policy)
    move(policy, {module})
    update = weights.pending()
    (group,) = update.groups
    rows = torch.cat([tensor for _, tensor in weights.tensors(update)])
    x = probe(rows.shape[1], torch.float32)
    torch.testing.assert_close(weights.expected(group, update), x @ rows.T)
    base = torch.cat([x @ policy.weight(site).T for site in group.sites], dim=1)
    added = weights.expected_of_adapters(group, weights.adapters())
    torch.testing.assert_close(base + added, x @ rows.T, rtol=1e-4, atol=1e-4)
    untouched: Callable[[Group], bool] = lambda g: g.name != group.name  # noqa: E731
    other = next(g for g in weights.groups if untouched(g))
    assert not weights.expected_of_adapters(other, weights.adapters()).any()
