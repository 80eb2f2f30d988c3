"""One update of a real model with adapters: what moves, what stays, and what dropout may not do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tropism import update
from tropism.lora.placement import Placement
from tropism.lora.plan import SitePlan
from tropism.measurements.layer_names import LinearSite
from tropism.models import LoRA, Model, load_policy
from tropism.objective.settings import Objective
from tropism.optimization import AdamW
from tropism.organism import weights_folder
from tropism.policy import Policy
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.types import Prompt, RolloutBatch

TEMPERATURE = 0.9
PROMPTS = [Prompt(id=text, task="t", text=text) for text in ("12+30=", "reverse cab")]


def load(*, adapted: bool = True, model: Model | None = None, **lora: Any) -> Policy:
    torch.manual_seed(0)
    policy = load_policy(
        model or Model(name="organism", dtype="float32"), LoRA(**{"rank": 4, "alpha": 8, **lora})
    )
    if adapted:
        with torch.no_grad():
            for site in policy.sites:
                adapter = policy.adapter(site)
                assert adapter is not None
                adapter.b.normal_(std=0.02)
    policy.model.train()
    return policy


def sample(policy: Policy, *, group_size: int = 4) -> RolloutBatch:
    engine = TransformersEngine()
    engine.bind(policy)
    rollouts = engine.generate(
        PROMPTS,
        group_size=group_size,
        sampling=Sampling(max_new_tokens=8, temperature=TEMPERATURE),
        seed=0,
        rollout=0,
    )
    num = len(PROMPTS) * group_size
    return RolloutBatch(
        rollout=0,
        rollouts=rollouts,
        components={},
        rewards=torch.zeros(num),
        advantages=torch.linspace(-1.0, 1.0, num),
        zero_variance=torch.zeros(len(PROMPTS), dtype=torch.bool),
    )


def backward(
    policy: Policy, batch: RolloutBatch, *, max_tokens: int = 512, **objective: Any
) -> tuple[update.PreparedBatch, Any]:
    settings = Objective(**objective)
    prepared = update.prepare(
        batch,
        policy,
        settings,
        max_completion_length=8,
        temperature=TEMPERATURE,
        max_tokens=max_tokens,
    )
    sums = update.accumulate_gradients(
        prepared, policy, settings, temperature=TEMPERATURE, backward=torch.Tensor.backward
    )
    return prepared, sums


@pytest.mark.fault(2)
def test_adapters_get_the_same_gradient_however_memory_cuts_the_samples() -> None:
    policy = load()
    batch = sample(policy)
    two_rows = max(len(r.prompt_token_ids) for r in batch.rollouts) + 2 * max(
        len(completion.token_ids) for completion in batch.completions
    )
    gradients, numbers = [], []
    for max_tokens in (512, two_rows, 1):
        policy.model.zero_grad()
        prepared, _ = backward(policy, batch, max_tokens=max_tokens)
        numbers.append(len(prepared.micro_batches))
        gradients.append(
            torch.cat([p.grad.flatten() for p in policy.named_trainable().values()])  # type: ignore[union-attr]
        )
    assert numbers[0] == 1  # one pack for both prompts
    assert numbers[0] < numbers[1] < numbers[2] == 8
    size = gradients[0].norm()
    assert size > 0
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * size
    assert (gradients[2] - gradients[0]).norm() < 1e-4 * size


def with_attention_dropout(folder: Path) -> Path:
    shutil.copytree(weights_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return folder


def with_dropout_modules(folder: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=112, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=2,
        eos_token_id=3, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (weights_folder() / name).exists():
            shutil.copy(weights_folder() / name, folder / name)
    return folder


@pytest.mark.fault(8)
@pytest.mark.parametrize("make", [with_attention_dropout, with_dropout_modules])
def test_dropout_leaves_an_unchanged_policy_at_kl_0_and_ratio_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    folder = make(tmp_path / "model")
    policy = load(adapted=False, model=Model(name=str(folder), dtype="float32"), dropout=0.1)
    log_ratios = []
    original = update.policy_loss

    def spy(logprobs: torch.Tensor, **options: Any) -> Any:
        log_ratios.append((logprobs - options["old_logprobs"]).detach())
        return original(logprobs, **options)

    monkeypatch.setattr(update, "policy_loss", spy)
    # With the share of tokens, old log-probabilities come from a pass of their own.
    _, sums = backward(policy, sample(policy), beta=0.1, entropy_top_fraction=0.5)
    assert sums.kl == 0.0
    assert len(log_ratios) == 1
    assert all((ratio == 0).all() for ratio in log_ratios)
    assert sums.mean("sampler_gap") < 1e-4  # the sampler, in eval mode, is that policy too


@pytest.mark.fault(21)
def test_a_kl_pass_does_not_unfreeze_what_is_frozen() -> None:
    policy = load()
    placement = Placement(policy.sites, policy.lora_layer, max_rank=4)
    plan = tuple(
        SitePlan(site.layer, site.module, "TRAIN", 4)
        if site.layer is not None and site.layer >= 4
        else SitePlan(site.layer, site.module, "KEEP", 0)
        for site in policy.sites
    )
    placement.apply(plan, None)

    def trainable() -> set[str]:
        return {name for name, p in policy.model.named_parameters() if p.requires_grad}

    before = trainable()
    assert len(before) == 2 * 7 * 8  # 8 of 12 layers
    batch = sample(policy)
    _, sums = backward(policy, batch, beta=0.1)
    assert sums.kl > 0
    assert trainable() == before
    with_gradient = {
        name for name, p in policy.model.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert with_gradient == before
    placement.check()


@pytest.mark.fault(22)
@pytest.mark.parametrize("should_checkpoint", [False, True])
def test_every_b_has_left_zero_after_one_step(should_checkpoint: bool) -> None:
    policy = load(
        adapted=False,
        model=Model(name="organism", dtype="float32", gradient_checkpointing=should_checkpoint),
    )
    assert policy.base.is_gradient_checkpointing == should_checkpoint
    optimizer, _ = AdamW().build(policy.named_trainable(), num_steps=1)
    backward(policy, sample(policy))
    optimizer.step()
    still = [
        site.key
        for site in policy.sites
        if (adapter := policy.adapter(site)) is None or not adapter.b.any()
    ]
    assert still == []


def factors(policy: Policy, site: LinearSite) -> tuple[torch.Tensor, torch.Tensor]:
    adapter = policy.adapter(site)
    assert adapter is not None
    return adapter.a, adapter.b


@pytest.mark.parametrize("kept", [False, True])
def test_lower_layers_run_once_and_nothing_changes(kept: bool) -> None:
    """mu = 2 with a KL term, LoRA on top: with the trunk and without it, to the last bit."""
    policy = load(adapted=False)
    batch = sample(policy)
    low = policy.sites[14]  # of layer 2
    if kept:  # trained before, stays applied: reference and policy part there
        with torch.no_grad():
            factors(policy, low)[1].normal_(std=0.1)
    top = [site for site in policy.sites if site.layer >= 9]
    for site in policy.sites:
        for factor in factors(policy, site):
            factor.requires_grad_(site in top)
    runs, calls = [], []
    layers = policy._layers
    count = layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    for lowest in (0, policy.lowest_layer(top)):
        calls.clear()
        policy.model.zero_grad()
        objective = Objective(beta=0.1, num_iterations=2)
        prepared = update.prepare(
            batch,
            policy,
            objective,
            max_completion_length=16,
            temperature=1.0,
            max_tokens=512,
            lowest_trained=lowest,
        )
        sums = [
            update.accumulate_gradients(
                prepared, policy, objective, temperature=1.0, backward=torch.Tensor.backward
            )
            for _ in range(2)
        ]
        gradients = [p.grad for p in policy.named_trainable().values() if p.grad is not None]
        runs.append((prepared.reference_logprobs, [vars(s) for s in sums], gradients))
        assert len(calls) == (3 if lowest == 0 else 1)
        depth = {trunk.depth for trunk in prepared.trunks if trunk is not None}
        assert depth == (set() if lowest == 0 else {2 if kept else 9})
    count.remove()
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
    assert runs[0][2]
