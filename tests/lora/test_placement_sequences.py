"""Random sequences of switches on a small decoder: nothing but training ever moves anything."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor

from tropism.lora.export import export_portable
from tropism.lora.optimizer_state import load_by_name
from tropism.lora.placement import Placement
from tropism.lora.plan import Plan, SitePlan
from tropism.models import LoRA, Model, load_policy
from tropism.optimization import AdamW
from tropism.organism import weights_folder
from tropism.policy import Policy

R, NUM_SITES = 3, 14
IDS = torch.randint(4, 100, (2, 10), generator=torch.Generator().manual_seed(1))

Entry = tuple[str, int, float]
"""State, rank and lr_scale that are asked for at one linear."""


@dataclass(frozen=True)
class Switch:
    """A plan, the linears cut off after it, whether the reference is refreshed, then steps."""

    entries: list[Entry]
    truncated: set[int]
    should_refresh: bool
    num_steps: int


entries = st.tuples(
    st.sampled_from(["OFF", "TRAIN", "TRAIN", "KEEP"]),
    st.integers(1, R),
    st.sampled_from([0.25, 1.0, 2.0]),
)
switches = st.builds(
    Switch,
    st.lists(entries, min_size=NUM_SITES, max_size=NUM_SITES).filter(
        lambda plan: any(state == "TRAIN" for state, _, _ in plan)
    ),
    st.sets(st.integers(0, NUM_SITES - 1), max_size=3),
    st.sampled_from([False, False, False, True]),
    st.integers(0, 2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, and an adapter in ``adapter``: of some linears, rank 2, and with a
    first component of 0 in others."""
    config = transformers.LlamaConfig(
        vocab_size=112,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=2,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights_folder() / file, path / file)
    tuned = load_policy(Model(str(path), dtype="float32"), LoRA(rank=2, alpha=2))
    with torch.no_grad():
        for i, site in enumerate(tuned.sites):
            adapter = tuned.adapter(site)
            assert adapter is not None
            if i % 3:
                adapter.b.normal_(std=0.3)
            if i % 3 == 2:
                adapter.b[:, 0] = 0
    export_portable(tuned.model, path / "adapter", base_model_name_or_path=None)  # type: ignore[arg-type]
    return path


class Rig:
    """A policy under placement, stepped as the trainer does."""

    def __init__(self, folder: Path, *, starts_tuned: bool, is_reversed: bool = False) -> None:
        torch.manual_seed(0)
        adapter = str(folder / "adapter") if starts_tuned else None
        model = Model(str(folder), dtype="float32", adapter=adapter)
        self.policy: Policy = load_policy(model, LoRA(rank=R, alpha=2 * R))
        self.placement = Placement(
            self.policy.sites, self.policy.lora_layer, max_rank=R, warmup_steps=3
        )
        self.named = self.policy.named_trainable()
        order = dict(reversed(self.named.items())) if is_reversed else self.named
        self.optimizer, _ = AdamW(weight_decay=0.1).build(order, num_steps=100)
        load_by_name(self.optimizer)

    def logits(self) -> Tensor:
        with torch.no_grad():
            return self.policy.model(input_ids=IDS).logits  # type: ignore[no-any-return]

    def reference(self) -> Tensor:
        with self.policy.reference():
            return self.logits()

    def merged(self) -> Tensor:
        with self.policy.merged():
            return self.logits()

    def step(self) -> None:
        self.policy.model(input_ids=IDS, labels=IDS).loss.backward()
        self.placement.mask_gradients()
        self.placement.scale_learning_rates(self.optimizer, 1e-2)
        self.optimizer.step()
        self.placement.after_step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Name -> a copy of its weight and of what the optimizer holds of it."""
        return {
            name: {"weight": p.detach().clone(), **copy.deepcopy(self.optimizer.state.get(p, {}))}
            for name, p in self.named.items()
        }

    def plan(self, wanted: list[Entry]) -> Plan:
        return self.placement.feasible(
            tuple(
                SitePlan(site.layer, site.module, state, rank if state == "TRAIN" else 0, scale)  # type: ignore[arg-type]
                for site, (state, rank, scale) in zip(self.policy.sites, wanted, strict=True)
            )
        )


@contextmanager
def unmoved(rig: Rig, *views: str) -> Iterator[None]:
    before = [getattr(rig, view)() for view in views]
    yield
    for view, old in zip(views, before, strict=True):
        assert torch.equal(getattr(rig, view)(), old), view


def sides(rig: Rig, states: dict[str, Any], index: int) -> list[dict[str, Tensor]]:
    """What there is of A and B of one linear, components first."""
    found = []
    for side in "AB":
        [name] = [n for n in states if f"{rig.policy.sites[index].name}.lora_{side}" in n]
        found.append({k: v.T if side == "B" and v.ndim > 1 else v for k, v in states[name].items()})
    return found


def assert_moments_follow_their_names(
    rig: Rig, before: dict[str, Any], after: dict[str, Any], old: Plan, new: Plan
) -> None:
    """No weight moved; moments are gone where a linear or component enters or leaves, alone."""
    for i, (was, now) in enumerate(zip(old, new, strict=True)):
        for kept, found in zip(sides(rig, before, i), sides(rig, after, i), strict=True):
            assert torch.equal(kept["weight"], found["weight"]), now.key
            if was.state == now.state == "TRAIN":
                low, high = sorted((was.rank, now.rank))
                assert kept.keys() == found.keys(), now.key
                for name in kept.keys() & {"exp_avg", "exp_avg_sq"}:
                    expected = kept[name].clone()
                    expected[low:high] = 0
                    assert torch.equal(found[name], expected), now.key
            elif was.state == "TRAIN" or now.state == "TRAIN":
                assert found.keys() == {"weight"}, now.key


def assert_only_what_trains_moved(
    rig: Rig, before: dict[str, Any], after: dict[str, Any], plan: Plan
) -> None:
    for i, entry in enumerate(plan):
        b = 1
        for kept, found in zip(sides(rig, before, i), sides(rig, after, i), strict=True):
            old, new = kept["weight"], found["weight"]
            assert torch.equal(old[entry.rank :], new[entry.rank :]), entry.key
        assert (new[: entry.rank] != old[: entry.rank]).any(dim=b).all(), entry.key


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=12, deadline=None
)
@given(st.booleans(), st.lists(switches, min_size=1, max_size=4))
def test_switches_move_no_output_and_moments_follow_names(
    folder: Path, tmp_path: Path, starts_tuned: bool, sequence: list[Switch]
) -> None:
    rig = Rig(folder, starts_tuned=starts_tuned)
    placement = rig.placement
    for switch in sequence:
        before, old = rig.state(), placement.plan
        with unmoved(rig, "logits", "reference", "merged"):
            placement.apply(rig.plan(switch.entries), rig.optimizer)
        placement.check()
        assert_moments_follow_their_names(rig, before, rig.state(), old, placement.plan)
        with unmoved(rig, "reference"):
            for i in switch.truncated:
                if placement.plan[i].state == "TRAIN":
                    placement.truncate(placement.sites[i])
        if switch.should_refresh:
            rig.policy.keep_reference()
            assert torch.equal(rig.reference(), rig.logits())
        before = rig.state()
        with unmoved(rig, "reference"):
            for _ in range(switch.num_steps):
                rig.step()
        if switch.num_steps:
            assert_only_what_trains_moved(rig, before, rig.state(), placement.plan)

    # Another optimizer, in another order, goes on by name as if nothing had happened.
    resumed = Rig(folder, starts_tuned=starts_tuned, is_reversed=True)
    resumed.policy.model.load_state_dict(rig.policy.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(rig.optimizer.state_dict()))
    resumed.placement.load_state_dict(placement.state_dict())
    for each in (rig, resumed):
        each.step()
    for name, parameter in rig.named.items():
        assert torch.equal(resumed.named[name], parameter), name

    # What is written is what the model computes.
    export_portable(rig.policy.model, tmp_path / "adapter", base_model_name_or_path=None)  # type: ignore[arg-type]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stock = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(stock(input_ids=IDS).logits, rig.logits())
