from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tropism.lora.export_merged import export_merged
from tropism.models import LoRA, Model, load_policy
from tropism.policy import Policy

IDS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))


def trained_organism(dtype: Any) -> Policy:
    torch.manual_seed(0)
    policy = load_policy(Model("organism", dtype=dtype), LoRA(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in policy.named_trainable().items():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    policy.model.eval()
    return policy


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


def digest(model: Any) -> str:
    """Of every tensor, byte for byte, and where it lies."""
    content = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        content.update(f"{name} {tensor.dtype} {tensor.data_ptr()}".encode())
        content.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


@pytest.mark.fault(24)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_are_those_of_the_merged_view(tmp_path: Path, dtype: str) -> None:
    policy = trained_organism(dtype)
    before, unmerged = digest(policy.model), logits(policy.model)
    with policy.merged():
        expected = logits(policy.model)
    folder = export_merged(policy.model, policy.tokenizer, tmp_path / "merged")  # type: ignore[arg-type]
    assert digest(policy.model) == before
    assert torch.equal(logits(policy.model), unmerged)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    assert (logits(loaded) - expected).abs().max().item() == 0.0
    with policy.reference():
        assert (logits(policy.model) - expected).abs().max().item() > 1e-2
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == dict(loaded.named_parameters()).keys()  # no head, no adapter
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_the_sum_is_made_in_fp32_and_cast_once(tmp_path: Path) -> None:
    policy = trained_organism("bfloat16")
    folder = export_merged(policy.model, None, tmp_path / "merged")  # type: ignore[arg-type]
    stored = load_file(folder / "model.safetensors")
    for site in policy.sites[::17]:
        adapter = policy.adapter(site)
        assert adapter is not None
        weight: Any = policy.linear(site).weight
        exact = weight.double() + 2 * adapter.b.double() @ adapter.a.double()
        # Half a unit in the last place of bf16, and the fp32 sum's own rounding.
        error = (stored[f"{site.name}.weight"].double() - exact).abs()
        assert (error <= exact.abs() * 2.0**-8 * 1.001 + 1e-9).all()
        assert not torch.equal(stored[f"{site.name}.weight"], weight)


def test_gpt2_transposed_linears(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    folder = export_merged(model, None, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    attention = model.get_base_model().transformer.h[1].attn.c_attn
    expected = attention.base_layer.weight + attention.get_delta_weight("default")
    merged = loaded.transformer.h[1].attn.c_attn.weight
    torch.testing.assert_close(merged, expected.detach(), rtol=0, atol=1e-6)
    assert torch.equal(loaded.transformer.h[1].attn.c_attn.bias, attention.base_layer.bias)


@pytest.mark.fault(24)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_on_a_tied_head_is_refused(tmp_path: Path) -> None:
    base = trained_organism("float32").base
    fresh = type(base)(base.config)
    model = get_peft_model(fresh, LoraConfig(r=2, lora_alpha=2, target_modules=["lm_head"]))
    before = digest(model)
    with pytest.raises(ValueError, match=r"'lm_head' is adapted and its weight is tied"):
        export_merged(model, None, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert digest(model) == before


def test_a_failed_export_leaves_model_and_older_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained_organism("float32")
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "older").write_text("export")
    before = digest(policy.model)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(policy.base), "save_pretrained", full_disk)
    with pytest.raises(OSError, match="No space"):
        export_merged(policy.model, None, folder)  # type: ignore[arg-type]
    assert [path.name for path in folder.iterdir()] == ["older"]
    assert digest(policy.model) == before
    assert not any(layer._disable_adapters for _, layer in policy._lora_layers())
