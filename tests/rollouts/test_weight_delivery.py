"""Sending weights to an engine that has vLLM's methods, and what it does wrong on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy
from tropism.rollouts import vllm_engine
from tropism.rollouts.engine import Sampling
from tropism.rollouts.requests import Answer
from tropism.rollouts.vllm_engine import VLLMEngine
from tropism.rollouts.weight_delivery import Delivery
from tropism.rollouts.weight_sync import WeightSync
from tropism.types import Prompt

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Packed(nn.Module):
    """A linear as vLLM has it: parts in one weight, products through ``quant_method``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.bias = None
        self.output_size, self.input_size = weight.shape
        self.params_dtype = weight.dtype
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T)


class StandIn:
    """What ``Delivery`` uses of ``vllm.LLM``, over one model; remembers what it was asked."""

    def __init__(self, weights: WeightSync) -> None:
        self.model = nn.Module()
        self.model.packed_modules_mapping = PACKED
        self.parts: dict[str, tuple[str, slice]] = {}
        for group in weights.groups:
            rows = [weights.policy.weight(site) for site in group.sites]
            parent: Any = self.model
            *path, own = group.name.split(".")
            for name in path:
                if not hasattr(parent, name):
                    parent.add_module(name, nn.Module())
                parent = getattr(parent, name)
            parent.add_module(own, Packed(torch.cat(rows)))
            start = 0
            for site, part in zip(group.sites, rows, strict=True):
                self.parts[f"{site.name}.weight"] = (group.name, slice(start, start + len(part)))
                start += len(part)
        self.asked: list[str] = []
        self.received: list[str] = []
        self.ignores: set[str] = set()
        self.keeps_cache = False

    def apply_model(self, function):
        return [function(self.model)]

    def collective_rpc(self, method, kwargs):
        self.asked.append(method)
        self.received = []
        for name, tensor in kwargs["weights_iterator"]:
            self.received.append(name)
            if name not in self.parts:
                continue  # an embedding
            module, rows = self.parts[name]
            if module.rsplit(".", 1)[-1] not in self.ignores:
                self.model.get_submodule(module).weight[rows] = tensor

    def reset_prefix_cache(self):
        self.asked.append("reset_prefix_cache")
        return not self.keeps_cache

    def sleep(self, level):
        self.asked.append(f"sleep {level}")

    def wake_up(self, tags):
        self.asked.append(f"wake {tags[0]}")


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return load_policy(Model(name="organism", dtype="float32"), LoRA(rank=4, alpha=8))


@pytest.fixture
def weights(policy: Policy) -> WeightSync:
    return WeightSync(policy, packed=PACKED, dtype=torch.float32)


def move(policy: Policy, module: str) -> None:
    with torch.no_grad():
        for site in policy.sites:
            if site.module == module:
                policy.adapter(site).b.add_(0.1)


def delivery(llm: StandIn, weights: WeightSync) -> Delivery:
    return Delivery(llm, weights, sync="merged", request=lambda *parts: parts)


@pytest.mark.fault(19)
def test_after_each_sync_and_only_then_the_prefix_cache_is_emptied(policy, weights):
    llm = StandIn(weights)
    sender = delivery(llm, weights)
    assert sender.deliver() is None
    assert llm.asked == []
    move(policy, "k_proj")
    num_bytes = sender.deliver()
    assert llm.asked == ["reload_weights", "reset_prefix_cache"]
    sizes = [policy.weight(s).nbytes for s in policy.sites if s.module in PACKED["qkv_proj"]]
    assert num_bytes == sum(sizes)
    assert sender.deliver() is None
    llm.keeps_cache = True
    move(policy, "k_proj")
    with pytest.raises(RuntimeError, match="prefix cache"):
        sender.deliver()


@pytest.mark.fault(17)
def test_an_engine_that_has_no_place_for_a_linear_is_refused(policy, weights):
    llm = StandIn(weights)
    del llm.model.model.layers.get_submodule("3").mlp.down_proj
    with pytest.raises(ValueError, match=r"no linear 'model.layers.3.mlp.down_proj' \(1 of"):
        delivery(llm, weights)


@pytest.mark.fault(17)
@pytest.mark.fault(15)
def test_an_engine_that_drops_what_it_is_sent_is_found_out(policy, weights):
    """As with vLLM where a prefix does not match: it loads nothing there, and says nothing."""
    llm = StandIn(weights)
    sender = delivery(llm, weights)
    llm.ignores = {"gate_up_proj"}
    move(policy, "k_proj")
    sender.deliver()
    move(policy, "gate_proj")
    with pytest.raises(RuntimeError, match=r"mlp.gate_up_proj' does not compute with the weights"):
        sender.deliver()
    llm.ignores = set()
    sender.deliver()  # what was not delivered is still owed


@pytest.mark.fault(20)
@pytest.mark.parametrize(("level", "num_sent"), [(1, 0), (2, 1)])
def test_a_deep_sleep_costs_all_weights_and_they_are_sent_again_before_the_cache(
    policy, weights, monkeypatch, level, num_sent
):
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda: None)
    engine = VLLMEngine(sleep_level=level)
    engine.bind(policy)
    llm = StandIn(weights)
    engine._llm, engine._delivery = llm, delivery(llm, weights)
    monkeypatch.setattr(
        engine,
        "_draw",
        lambda _, requests, progress: [Answer([5], [0.0], "length") for _ in requests],
    )
    prompts = [Prompt(id="a", task="t", text="1+1=")]
    options = {"group_size": 2, "sampling": Sampling(max_new_tokens=1), "seed": 0, "rollout": 0}
    engine.generate(prompts, **options)
    assert llm.asked == [f"sleep {level}"]
    engine.generate(prompts, **options)  # validated again, without a step between
    waking = ["wake weights", *["reload_weights", "reset_prefix_cache"] * num_sent]
    assert llm.asked[1:] == [*waking, "wake kv_cache", "reset_prefix_cache", f"sleep {level}"]
    if level == 2:
        everything = WeightSync(policy, packed=PACKED, dtype=torch.float32, has_base=False)
        assert llm.received == everything.names(everything.pending())
