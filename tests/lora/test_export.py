from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tropism.lora.export import export_full, export_portable, load_adapter_tensors

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# PEFT's advice for the adapters that must be refused anyway.
TIED = "ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"
IDS = torch.tensor([[1, 5, 9, 2, 7, 30, 11], [3, 3, 8, 21, 4, 6, 12]])


def tiny_llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # as from_pretrained does: rotary buffers stay fp32
        parameter.data = parameter.data.to(dtype)
    return model


def adapted(dtype: torch.dtype = torch.float32, seed: int = 1, **options: Any) -> PeftModel:
    """A tiny model whose adapters have moved away from zero."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": ALL_LINEAR, **options}
    model = get_peft_model(tiny_llama(dtype), LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS).logits
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stock_peft_gives_the_very_same_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = adapted(dtype)  # bf16 base: PEFT keeps the adapters in fp32
    expected, base = logits(model), logits(tiny_llama(dtype))
    folder = export_portable(model, tmp_path / "adapter", base_model_name_or_path="some/base")
    loaded = PeftModel.from_pretrained(tiny_llama(dtype), folder)
    found = logits(loaded)
    assert found.dtype == dtype
    assert (found - expected).abs().max().item() == 0.0
    assert (base - expected).abs().max().item() > 1e-3
    assert torch.equal(logits(model), expected)  # the exported model itself did not change
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"


def test_the_config_has_nothing_to_interpret(tmp_path: Path) -> None:
    folder = export_portable(adapted(), tmp_path / "a", base_model_name_or_path=None)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["use_rslora"] is False
    assert config["bias"] == "none"
    linears = [n for n, m in tiny_llama().named_modules() if isinstance(m, torch.nn.Linear)]
    assert config["target_modules"] == [name for name in linears if name != "lm_head"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 3 * 7
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    trained = adapted().get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight
    assert torch.equal(tensors[key], 4.0 * trained)  # alpha / r = 16 / 4


def test_the_same_adapter_gives_the_same_bytes(tmp_path: Path) -> None:
    files = [
        [path.read_bytes() for path in sorted(folder.iterdir())]
        for folder in (
            export_portable(adapted(), tmp_path / name, base_model_name_or_path="b")
            for name in ("one", "two")
        )
    ]
    assert files[0] == files[1]


def test_only_listed_modules_are_adapted_on_loading(tmp_path: Path) -> None:
    model = adapted(target_modules=r"model\.layers\.(0|2)\.(self_attn\.q_proj|mlp\.down_proj)")
    folder = export_portable(model, tmp_path / "a", base_model_name_or_path=None)
    loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    names = {n.split(".lora_A")[0] for n, _ in loaded.named_modules() if n.endswith("lora_A")}
    assert len(names) == 4
    assert torch.equal(logits(loaded), logits(model))


def test_rslora_with_a_power_of_two_scaling_is_exact(tmp_path: Path) -> None:
    model = adapted(torch.bfloat16, use_rslora=True, lora_alpha=1)  # 1 / sqrt(4) = 0.5
    folder = export_portable(model, tmp_path / "a", base_model_name_or_path=None)
    loaded = PeftModel.from_pretrained(tiny_llama(torch.bfloat16), folder)
    assert torch.equal(logits(loaded), logits(model))


def test_smaller_ranks_are_padded(tmp_path: Path) -> None:
    model = adapted(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 1})
    folder = export_portable(model, tmp_path / "a", base_model_name_or_path=None)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert tensors[key].shape == (4, 16)
    assert not tensors[key][2:].any()
    loaded = PeftModel.from_pretrained(tiny_llama(), folder)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-6)


def test_gpt2_transposed_linears(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def base() -> Any:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        return GPT2LMHeadModel(config).eval()

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(base(), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    folder = export_portable(model, tmp_path / "a", base_model_name_or_path=None)
    assert torch.equal(logits(PeftModel.from_pretrained(base(), folder)), logits(model))


def test_an_older_export_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    export_portable(adapted(seed=1), folder, base_model_name_or_path=None)
    (folder / "stale").write_text("of the older export")
    model = adapted(seed=2)
    export_portable(model, folder, base_model_name_or_path=None)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_llama(), folder)), logits(model))


def test_a_failed_export_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_portable(adapted(), tmp_path / "adapter", base_model_name_or_path=None)
    before = (folder / "adapter_model.safetensors").read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tropism.lora.export.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        export_portable(adapted(seed=2), folder, base_model_name_or_path=None)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.filterwarnings(TIED)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 12}, "scaling of 3, which is no power of two"),
        ({"use_rslora": True, "r": 2, "lora_alpha": 2}, "no power of two"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"target_modules": ["embed_tokens"]}, "no plain LoRA of a linear"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export_portable(adapted(**options), tmp_path / "a", base_model_name_or_path=None)
    assert not (tmp_path / "a").exists()


def test_a_fold_that_overflows_is_refused(tmp_path: Path) -> None:
    model = adapted()
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    layer.lora_B["default"].weight.data[0, 0] = 3e38
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj.*overflows"):
        export_portable(model, tmp_path / "a", base_model_name_or_path=None)


def test_unknown_adapter_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'other'.*\['default'\]"):
        export_portable(
            adapted(), tmp_path / "a", adapter_name="other", base_model_name_or_path=None
        )


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.fault(24)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_full_export_loads_with_tied_embeddings(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_llama(dtype, seed=3)
    folder = export_full(model, None, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_a_full_export_of_an_adapted_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export_portable"):
        export_full(adapted(), None, tmp_path / "model")


# --- reading adapters -----------------------------------------------------------------------------


def deltas(model: PeftModel) -> dict[str, torch.Tensor]:
    """PEFT's own update of every module."""
    return {
        name: layer.get_delta_weight("default")
        for name, layer in model.get_base_model().named_modules()
        if hasattr(layer, "get_delta_weight")
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {
            "rank_pattern": {"q_proj": 2, r"model\.layers\.1\.mlp\.up_proj": 3},
            "alpha_pattern": {"v_proj": 5, "q_proj": 7},
        },
    ],
)
def test_a_stock_adapter_is_read_as_peft_applies_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = adapted(**options)
    model.save_pretrained(tmp_path)
    config, tensors = load_adapter_tensors(tmp_path)
    expected = deltas(model)
    assert config.r == 4
    assert tensors.keys() == expected.keys()
    for name, (a, b, scaling) in tensors.items():
        torch.testing.assert_close(scaling * b @ a, expected[name], rtol=1e-6, atol=1e-7)


def test_a_portable_export_is_read_back(tmp_path: Path) -> None:
    model = adapted()
    export_portable(model, tmp_path / "a", base_model_name_or_path=None)
    _, tensors = load_adapter_tensors(tmp_path / "a")
    expected = deltas(model)
    assert {scaling for _, _, scaling in tensors.values()} == {1.0}
    for name, (a, b, _) in tensors.items():
        torch.testing.assert_close(b @ a, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings(TIED)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding"),
    ],
)
def test_other_adapters_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    adapted(**options).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ValueError, match=message):
        load_adapter_tensors(tmp_path)


def edit(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.fault(25)
@pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path, option: str) -> None:
    adapted(rank_pattern={"q_proj": 2}).save_pretrained(tmp_path)
    edit(tmp_path, **{option: {"q_proj": 2, "q_prj": 8}})
    with pytest.raises(ValueError, match=f"{option} 'q_prj' matches none of its 21 modules"):
        load_adapter_tensors(tmp_path)


def test_a_config_that_does_not_fit_its_tensors(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    edit(tmp_path, r=8)
    with pytest.raises(ValueError, match=r"has A \(4, \d+\).*says rank 8"):
        load_adapter_tensors(tmp_path)


def test_half_an_adapter(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj' has only one"):
        load_adapter_tensors(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither adapter_model"):
        load_adapter_tensors(tmp_path)
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        load_adapter_tensors(tmp_path / "nowhere")
