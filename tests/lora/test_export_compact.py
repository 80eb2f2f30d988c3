from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from tropism.lora.export import load_adapter_tensors
from tropism.lora.export_compact import export_compact

R = 4
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.tensor([[1, 5, 9, 2, 7, 30, 11], [3, 3, 8, 21, 4, 6, 12]])
NAME = "model.layers.{}.{}"


def llama(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=12,  # layers 1 and 11 must not be taken for each other
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def gpt2(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval().to(dtype)


def placed(base: Any, in_use: dict[str, list[int]], **options: Any) -> PeftModel:
    """Adapters of which only these components of these modules have trained."""
    options = {"target_modules": ALL_LINEAR, **options}
    config = LoraConfig(r=R, lora_alpha=2 * R, task_type="CAUSAL_LM", **options)
    model = get_peft_model(base, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, components in in_use.items():
            weight = model.get_base_model().get_submodule(name).lora_B["default"].weight
            noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight[:, components] = 0.1 * noise[:, components]
    return model


WHOLE = {
    NAME.format(1, "self_attn.q_proj"): [0, 1, 2, 3],
    NAME.format(7, "mlp.up_proj"): [*range(R)],
}
TRIMMED = {
    NAME.format(1, "self_attn.q_proj"): [0, 1, 2, 3],
    NAME.format(11, "self_attn.q_proj"): [0, 2],
    NAME.format(1, "mlp.down_proj"): [3],
    NAME.format(10, "mlp.gate_proj"): [0, 1, 2],
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_left_out_change_not_a_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = placed(llama(dtype), WHOLE)
    expected = logits(model)
    folder = export_compact(model, tmp_path / "c", base_model_name_or_path="some/base")
    loaded = PeftModel.from_pretrained(llama(dtype), folder)
    assert (logits(loaded) - expected).abs().max().item() == 0.0
    assert (logits(llama(dtype)) - expected).abs().max().item() > 1e-3
    adapted = {n.split(".lora_A")[0] for n, _ in loaded.named_modules() if n.endswith("lora_A")}
    assert adapted == {f"base_model.model.{name}" for name in WHOLE}
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_components_left_out_change_rounding_alone(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    model = placed(llama(dtype), TRIMMED)
    folder = export_compact(model, tmp_path / "c", base_model_name_or_path=None)
    loaded = PeftModel.from_pretrained(llama(dtype), folder)
    assert logits(loaded).dtype == dtype
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=tolerance)


def test_each_component_is_there_bit_for_bit_and_no_other(tmp_path: Path) -> None:
    model = placed(llama(), TRIMMED)
    folder = export_compact(model, tmp_path / "c", base_model_name_or_path=None)
    config, tensors = load_adapter_tensors(folder)
    assert tensors.keys() == TRIMMED.keys()
    for name, components in TRIMMED.items():
        layer = model.get_base_model().get_submodule(name)
        a, b, scaling = tensors[name]
        assert scaling == 1.0
        assert torch.equal(a, layer.lora_A["default"].weight[components])
        assert torch.equal(b, 2 * layer.lora_B["default"].weight[:, components])
    loaded = PeftModel.from_pretrained(llama(), folder)
    for name, components in TRIMMED.items():
        layer = loaded.get_base_model().get_submodule(name)
        assert layer.r == {"default": len(components)}
        assert layer.scaling == {"default": 1.0}
    smaller = {name: len(c) for name, c in TRIMMED.items() if len(c) < R}
    assert config.r == config.lora_alpha == R
    assert config.rank_pattern == config.alpha_pattern == smaller
    stored = load_file(folder / "adapter_model.safetensors")
    per_component = {"q_proj": 16 + 16, "down_proj": 24 + 16, "gate_proj": 16 + 24}
    assert sum(t.numel() for t in stored.values()) == sum(
        len(c) * per_component[name.rsplit(".", 1)[1]] for name, c in TRIMMED.items()
    )


def test_gpt2_transposed_linears(tmp_path: Path) -> None:
    in_use = {"transformer.h.1.attn.c_attn": [0, 1, 2, 3]}
    options = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    model = placed(gpt2(), in_use, **options)
    folder = export_compact(model, tmp_path / "c", base_model_name_or_path=None)
    assert torch.equal(logits(PeftModel.from_pretrained(gpt2(), folder)), logits(model))
    assert json.loads((folder / "adapter_config.json").read_text())["fan_in_fan_out"] is True


def test_an_adapter_that_never_trained_loads_as_the_base(tmp_path: Path) -> None:
    model = placed(llama(), {})
    folder = export_compact(model, tmp_path / "c", base_model_name_or_path=None)
    loaded = PeftModel.from_pretrained(llama(), folder)
    assert torch.equal(logits(loaded), logits(llama()))
    assert len(load_file(folder / "adapter_model.safetensors")) == 2


def test_the_same_adapter_gives_the_same_bytes_and_replaces_the_older(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "stale").write_text("of the older export")
    files = []
    for _ in range(2):
        folder = export_compact(
            placed(llama(), TRIMMED), tmp_path / "c", base_model_name_or_path="b"
        )
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    assert files[0].keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_names_that_patterns_confuse_are_refused(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        """PEFT's pattern `up` matches `inner.up` too."""

        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 4)
            self.inner = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 4)})

    config = LoraConfig(r=R, lora_alpha=R, target_modules=["up"])
    model = get_peft_model(Twice(), config)  # type: ignore[arg-type]
    base: Any = model.get_base_model()
    with torch.no_grad():
        base.up.lora_B["default"].weight[:, :2] = 1.0
        base.inner["up"].lora_B["default"].weight[:] = 1.0
    with pytest.raises(ValueError, match=r"'inner\.up' cannot be told from 'up'"):
        export_compact(model, tmp_path / "c", base_model_name_or_path=None)
    assert not (tmp_path / "c").exists()
