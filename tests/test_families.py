"""Each decoder family by a tiny random model: LoRA everywhere, one policy in both lights."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import transformers

from tropism.models import LoRA, Model, load_policy
from tropism.organism import weights_folder
from tropism.policy import Policy
from tropism.rollouts.collate import micro_batches, training_batches
from tropism.rollouts.engine import Sampling
from tropism.rollouts.transformers_engine import TransformersEngine
from tropism.types import Prompt

COMMON = {
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "gpt2": (
        "GPT2Config",
        {"n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.1},
    ),
}
# Linears of one layer, or of the three layers of the hybrid.
NUM_LINEARS = {
    "llama": 21,
    "qwen2": 21,
    "gemma3": 21,
    "olmo2": 21,
    "phi3": 12,
    "lfm2": 2 * 2 + 4 + 3 * 3,
    "gpt2": 12,
}
PROMPTS = [
    Prompt(id=f"p{i}", task="t", text=text)
    for i, text in enumerate(["12+30=", "a", "sort the letters of hbdacgef", "larger: 3 or 25"])
]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.9)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    name, extra = FAMILIES[family]
    common = (
        {"vocab_size": 112, "bos_token_id": 2, "eos_token_id": 3} if family == "gpt2" else COMMON
    )
    config = getattr(transformers, name)(**{**common, **extra})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # sharper than the usual start: differences show
    path = tmp_path_factory.mktemp(family)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (weights_folder() / file).exists():
            shutil.copy(weights_folder() / file, path / file)
    return path


@pytest.fixture
def policy(folder) -> Policy:
    torch.manual_seed(0)
    loaded = load_policy(Model(name=str(folder), dtype="float32"), LoRA(rank=4, alpha=4))
    with torch.no_grad():
        for site in loaded.sites:
            loaded.adapter(site).b.normal_(std=0.1)
    return loaded


def test_every_linear_but_the_head_is_found_and_named_once(policy, family):
    assert len(policy.sites) == NUM_LINEARS[family]
    assert len({(site.layer, site.module) for site in policy.sites}) == len(policy.sites)
    assert {site.layer for site in policy.sites} == {0, 1, 2}
    assert not any("head" in site.name for site in policy.sites)


def test_left_padded_sampling_and_training_are_one_policy(policy):
    engine = TransformersEngine()
    engine.bind(policy)
    rollouts = engine.generate(PROMPTS, group_size=2, sampling=SAMPLING, seed=0, rollout=0)
    alone = engine.generate(PROMPTS[1:2], group_size=2, sampling=SAMPLING, seed=0, rollout=0)
    assert [c.token_ids for c in alone[0].completions] == [
        c.token_ids for c in rollouts[1].completions
    ]
    completions = [c for rollout in rollouts for c in rollout.completions]
    keep = torch.ones(len(completions), dtype=torch.bool)
    for part in micro_batches(rollouts, keep=keep, max_tokens=512, pad_token_id=0):
        with torch.no_grad():
            logprobs, _ = policy.completion_logprobs(part, temperature=SAMPLING.temperature)
        for i, row in enumerate(part.rows.tolist()):
            sampled = completions[row].sampler_logprobs
            torch.testing.assert_close(logprobs[i, : len(sampled)], sampled, rtol=0, atol=1e-3)


def results_of(policy, parts):
    """Row -> log-probabilities, and all gradients of a weighted sum of them."""
    policy.model.zero_grad()
    found = {}
    for part in parts:
        logprobs, _ = policy.completion_logprobs(part, temperature=1.0)
        (logprobs * (1 + part.rows[:, None])).sum().backward()
        for i, row in enumerate(part.rows.tolist()):
            found[row] = logprobs[i, : int(part.mask[i].sum())].detach()
    return found, [p.grad.clone() for p in policy.named_trainable().values()]


@pytest.mark.parametrize("max_tokens", [40, 60, 4096])
def test_packs_are_the_rows_alone_gradients_included(policy, family, max_tokens):
    assert policy.can_pack == (family != "lfm2")
    engine = TransformersEngine()
    engine.bind(policy)
    rollouts = engine.generate(PROMPTS, group_size=3, sampling=SAMPLING, seed=2, rollout=0)
    options = {"keep": torch.arange(12) != 4, "pad_token_id": 0}
    alone = results_of(policy, micro_batches(rollouts, max_tokens=1, **options))
    parts = list(
        training_batches(rollouts, max_tokens=max_tokens, can_pack=policy.can_pack, **options)
    )
    if policy.can_pack:
        assert sum(len(part.rows) for part in parts) == 11
        assert all(len(part.input_ids) <= max_tokens for part in parts)
        assert (len(parts) == 1) == (max_tokens == 4096)
    together = results_of(policy, parts)
    assert together[0].keys() == alone[0].keys()
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)
    assert all(gradient.abs().sum() > 0 for gradient in alone[1])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pass_from_a_trunk_is_one_from_the_bottom(policy, depth):
    """Of the top layers; those below neither run again nor train."""
    engine = TransformersEngine()
    engine.bind(policy)
    rollouts = engine.generate(PROMPTS, group_size=2, sampling=SAMPLING, seed=3, rollout=0)
    for site in policy.sites:
        for factor in (policy.adapter(site).a, policy.adapter(site).b):
            factor.requires_grad_(site.layer >= depth)
    options = {"keep": torch.ones(8, dtype=torch.bool), "max_tokens": 4096, "pad_token_id": 0}
    part, *_ = training_batches(rollouts, can_pack=policy.can_pack, **options)
    trunk, results = policy.trunk(part, depth), []
    assert (trunk is not None) == policy.can_pack
    for start in (None, trunk):
        policy.model.zero_grad()
        logprobs, entropy = policy.completion_logprobs(part, temperature=0.7, trunk=start)
        logprobs.sum().backward()
        gradients = [p.grad for p in policy.named_trainable().values() if p.requires_grad]
        results.append((logprobs.detach(), entropy, gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert all(gradient.any() for gradient in results[0][2])
    if trunk is not None:  # it is what enters that layer, so it must matter
        other = replace(trunk, hidden=trunk.hidden + 1)
        with torch.no_grad():
            moved, _ = policy.completion_logprobs(part, temperature=0.7, trunk=other)
        assert not torch.equal(moved, results[0][0])


def test_merged_is_the_unmerged_policy(policy):
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        unmerged = policy.model(input_ids=ids).logits
        with policy.merged():
            merged = policy.model(input_ids=ids).logits
    torch.testing.assert_close(merged, unmerged, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("modules", [("q_proj", "k_proj")])
def test_fused_projections_can_only_be_adapted_whole(folder, family, modules):
    fused = {"phi3": "qkv_proj", "gpt2": "c_attn"}
    if family in fused:
        with pytest.raises(ValueError, match=rf"(?s)'k_proj', 'q_proj'.*{fused[family]}"):
            load_policy(Model(name=str(folder)), LoRA(modules=modules))
    else:
        adapted = load_policy(Model(name=str(folder)), LoRA(modules=modules))
        assert {s.module for s in adapted.sites if adapted.adapter(s)} == set(modules)


def test_dropout_in_the_base_is_off_in_training(policy):
    policy.model.train()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, policy.model(input_ids=ids).logits)
