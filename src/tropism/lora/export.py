"""LoRA adapters as files: one that stock PEFT (and vLLM) reads to exactly the trained logits.

1. The scaling is folded into B. It is a power of two, so that nothing is rounded, and what reads
   the file computes with a scaling of exactly 1: ``r`` = ``lora_alpha`` = the largest rank.
2. Every module is listed by its full name; there are no rank or alpha patterns to interpret.
3. A module of smaller rank is padded with zero components.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tropism.provenance import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."  # what PEFT puts before a module's name
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

# Other initialisations change the base weights too, so the adapter alone is not the update.
_INITS_THAT_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
# Options under which the weight in use is not W_0 + scaling * B @ A of the listed linears.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias in B",
    "modules_to_save": "whole modules trained beside LoRA",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "LoRA on bare parameters",
    "layer_replication": "replicated layers",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}


def export_portable(
    model: PeftModel,
    folder: str | Path,
    *,
    adapter_name: str = "default",
    base_model_name_or_path: str | None,
) -> Path:
    """Write an adapter that stock ``PeftModel.from_pretrained(base, folder)`` loads.

    In the same dtype its logits then differ by exactly 0 from the un-merged forward of ``model``
    in eval mode, where all modules have one rank; ranks that differ are padded, and sums of
    more terms may round differently. Modules whose B is still zero are written too.

    Args:
        model: On the base weights that the adapter belongs to; not changed.
        folder: Replaced as a whole; half an adapter is never there.
        adapter_name: Which of the model's adapters.
        base_model_name_or_path: What ``AutoPeftModel`` is to load as base; None leaves it open.

    Returns:
        ``folder``.

    Raises:
        ValueError: No such adapter, a scaling that is no power of two, or an adapter that has
            more than A and B of linears (DoRA, biases, saved modules, ...).
    """
    config, layers = plain_lora(model, adapter_name)
    pairs = {name: folded(name, layer, adapter_name) for name, layer in layers.items()}
    rank = max(len(a) for a, _ in pairs.values())
    padded = {}
    for name, (a, b) in pairs.items():
        missing = rank - len(a)
        padded[name] = (
            nn.functional.pad(a, (0, 0, 0, missing)),
            nn.functional.pad(b, (0, missing)),
        )
    return write_adapter(
        folder, padded, like=config, base_model_name_or_path=base_model_name_or_path
    )


def plain_lora(model: PeftModel, adapter_name: str) -> tuple[LoraConfig, dict[str, LoraLayer]]:
    """An adapter's config and its layers, by module name.

    Raises:
        ValueError: No such adapter, it adapts nothing, or it is more than A and B of linears.
    """
    config = model.peft_config.get(adapter_name)
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"adapter_name={adapter_name!r}: the model has no such LoRA adapter; it has "
            f"{sorted(model.peft_config)}."
        )
    _refuse(config, f"adapter {adapter_name!r}")
    layers = {
        name: layer
        for name, layer in model.get_base_model().named_modules()
        if isinstance(layer, LoraLayer) and adapter_name in layer.scaling
    }
    if not layers:
        raise ValueError(f"adapter_name={adapter_name!r} adapts no linear: nothing to export.")
    return config, layers


def write_adapter(
    folder: str | Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    *,
    like: LoraConfig,
    base_model_name_or_path: str | None,
) -> Path:
    """Write A [r, d_in] and B [d_out, r] of each module as an adapter with a scaling of 1.

    Ranks that differ from the largest become patterns; ``folder`` is replaced as a whole.
    """
    rank = max(len(a) for a, _ in pairs.values())
    smaller = {name: len(a) for name, (a, _) in pairs.items() if len(a) < rank}
    for name, (a, _) in pairs.items():  # PEFT reads patterns as regular expressions
        if _by_pattern(smaller, name, rank) != len(a):
            raise ValueError(
                f"{name!r} cannot be told from {get_pattern_key(list(smaller), name)!r} in PEFT's "
                "rank_pattern: use export_portable, which needs none."
            )
    config = LoraConfig(
        task_type=like.task_type,
        base_model_name_or_path=base_model_name_or_path,
        inference_mode=True,
        r=rank,
        lora_alpha=rank,
        rank_pattern=smaller,
        alpha_pattern=dict(smaller),
        lora_dropout=like.lora_dropout,
        fan_in_fan_out=like.fan_in_fan_out,
        target_modules=list(pairs),
    )
    content = {**config.to_dict(), "target_modules": list(pairs)}  # PEFT's own order is random
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.contiguous()
    with whole_folder(folder) as filling:
        save_file(tensors, filling / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(content, indent=2, sort_keys=True)
        (filling / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    return Path(folder)


def export_full(model: PreTrainedModel, tokenizer: Any, folder: str | Path) -> Path:
    """Write a whole model and its tokenizer, as ``from_pretrained`` reads them.

    Weights keep their dtype, and tied embeddings stay tied. ``folder`` is replaced as a whole.

    Raises:
        ValueError: The model carries adapters (their weights would be taken for the model's).
    """
    if any(isinstance(module, LoraLayer) for module in model.modules()):
        raise ValueError("export_full of a model with LoRA adapters: use export_portable.")
    with whole_folder(folder) as filling:
        model.save_pretrained(filling)
        if tokenizer is not None:
            tokenizer.save_pretrained(filling)
    return Path(folder)


def load_adapter_tensors(
    folder: str | Path,
) -> tuple[LoraConfig, dict[str, tuple[Tensor, Tensor, float]]]:
    """Read any stock PEFT LoRA adapter of linears.

    Returns:
        Its config, and module name in the base model -> (A [r, d_in], B [d_out, r], scaling),
        with the dtypes of the file; the update is ``scaling * B @ A``.

    Raises:
        ValueError: No adapter there, one that has more than A and B of linears, tensors that do
            not fit the config, or a rank or alpha pattern that matches no module.
    """
    path = Path(folder)
    if not (path / CONFIG_FILE).is_file():
        raise ValueError(f"adapter {str(path)!r}: no {CONFIG_FILE} there; give a PEFT folder.")
    config = PeftConfig.from_pretrained(str(path))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter {str(path)!r} is {config.peft_type}, not LoRA.")
    _refuse(config, f"adapter {str(path)!r}")
    factors = _pairs(_read_tensors(path), path)
    _check_patterns(config, factors, path)
    adapters = {}
    for name, (a, b) in factors.items():
        rank = _by_pattern(config.rank_pattern, name, config.r)
        alpha = _by_pattern(config.alpha_pattern, name, config.lora_alpha)
        if a.ndim != 2 or b.ndim != 2 or not rank == a.shape[0] == b.shape[1]:
            raise ValueError(
                f"adapter {str(path)!r}: {name!r} has A {tuple(a.shape)} and B {tuple(b.shape)}, "
                f"its config says rank {rank}; only LoRA on linears is read."
            )
        scaling = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        adapters[name] = (a, b, float(scaling))
    return config, adapters


def _refuse(config: LoraConfig, where: str) -> None:
    for option, meaning in _UNSUPPORTED.items():
        if value := getattr(config, option, None):
            raise ValueError(
                f"{where} has {option}={value!r} ({meaning}): only plain LoRA on linears is "
                "supported; train without it, or merge it into the base first."
            )
    if config.bias != "none":
        raise ValueError(f"{where} has bias={config.bias!r}: only bias='none' is supported.")
    if config.init_lora_weights not in _INITS_THAT_KEEP_THE_BASE:
        raise ValueError(
            f"{where} has init_lora_weights={config.init_lora_weights!r}, which changes the base "
            f"weights too: use one of {list(_INITS_THAT_KEEP_THE_BASE)}, or convert it with "
            "PEFT's path_initial_model_for_weight_conversion."
        )


def folded(name: str, layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """A [r, d_in] and scaling * B [d_out, r], on the CPU.

    Raises:
        ValueError: More than A and B of a linear, or a scaling that B cannot take in exactly.
    """
    a, b = (side.cpu() for side in plain_factors(name, layer, adapter))
    scaling = float(layer.scaling[adapter])
    if scaling <= 0 or math.frexp(scaling)[0] != 0.5:
        raise ValueError(
            f"{name!r} has a LoRA scaling of {scaling:g}, which is no power of two, so folding it "
            "into B would round: choose alpha / rank (alpha / sqrt(rank) with rsLoRA) as 1, 2, 4..."
        )
    scaled = b * scaling
    if not torch.equal(scaled / scaling, b):
        raise ValueError(f"{name!r}: B times {scaling:g} overflows {b.dtype}, or B is not finite.")
    return a, scaled


def plain_factors(name: str, layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """A [r, d_in] and B [d_out, r], where they are.

    Raises:
        ValueError: The adapter is more than these, or not on a linear.
    """
    if adapter not in layer.lora_A or layer.lora_variant.get(adapter) is not None:
        raise ValueError(f"{name!r} has no plain LoRA of a linear: export would not be exact.")
    a, b = (side[adapter].get_parameter("weight").detach() for side in (layer.lora_A, layer.lora_B))
    if a.ndim != 2 or layer.lora_bias[adapter]:
        raise ValueError(f"{name!r} is no linear without LoRA bias: export would not be exact.")
    return a, b


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if (path / WEIGHTS_FILE).is_file():
        return load_file(path / WEIGHTS_FILE)
    if (path / "adapter_model.bin").is_file():
        content: dict[str, Tensor] = torch.load(
            path / "adapter_model.bin", map_location="cpu", weights_only=True
        )
        return content
    raise ValueError(f"adapter {str(path)!r}: neither {WEIGHTS_FILE} nor adapter_model.bin there.")


def _pairs(tensors: Mapping[str, Tensor], path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Module name -> (A, B); refuses every tensor that is neither."""
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, dot, side = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not dot or side not in ("lora_A", "lora_B"):
            raise ValueError(
                f"adapter {str(path)!r} has a tensor {key!r}: only lora_A and lora_B of linears "
                "are read (no DoRA, bias, embeddings or saved modules)."
            )
        sides.setdefault(name, {})[side] = tensor
    if lonely := sorted(name for name, pair in sides.items() if len(pair) != 2):
        raise ValueError(f"adapter {str(path)!r}: {lonely[0]!r} has only one of A and B.")
    if not sides:
        raise ValueError(f"adapter {str(path)!r} holds no tensors.")
    return {name: (pair["lora_A"], pair["lora_B"]) for name, pair in sides.items()}


def _by_pattern(patterns: Mapping[str, int] | None, name: str, default: int) -> int:
    patterns = patterns or {}
    return patterns.get(get_pattern_key(list(patterns), name), default)


def _check_patterns(config: LoraConfig, names: Mapping[str, Any], path: Path) -> None:
    for option in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, option) or {}:
            if not any(get_pattern_key([pattern], name) == pattern for name in names):
                raise ValueError(
                    f"adapter {str(path)!r}: {option} {pattern!r} matches none of its "
                    f"{len(names)} modules: remove it from {CONFIG_FILE}, or mend its spelling."
                )
