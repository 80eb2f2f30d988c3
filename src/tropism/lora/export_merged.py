"""A whole model with its adapter merged in, for what reads no adapters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from torch import Tensor

from tropism.lora.export import plain_factors, plain_lora
from tropism.lora.views import View
from tropism.provenance import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_merged(
    model: PeftModel,
    tokenizer: Any,
    folder: str | Path,
    *,
    adapter_name: str = "default",
) -> Path:
    """Write W_0 + scaling * B A as ``AutoModelForCausalLM.from_pretrained`` reads it.

    The sum is made in fp32 from the pristine W_0 and cast once to its dtype; the logits are those
    of the merged view that sampled (``Policy.merged``). In bf16 the cast loses most of a small
    update, which is why adapters are the first export.

    Args:
        model: Not changed: nothing is ever written into W_0.
        tokenizer: Written beside it; None writes none.
        folder: Replaced as a whole. Safetensors; tied embeddings stay tied.
        adapter_name: Which of the model's adapters.

    Returns:
        ``folder``.

    Raises:
        ValueError: As ``export_portable``, but for the scaling, or an adapter on a weight that is
            tied to another (an output head): merged they would differ.
    """
    _, layers = plain_lora(model, adapter_name)
    base = cast("PreTrainedModel", model.get_base_model())
    uses = Counter(id(weight) for _, weight in base.named_parameters(remove_duplicate=False))
    with View() as view, torch.no_grad():
        for name, layer in layers.items():
            weight = layer.get_base_layer().weight
            if uses[id(weight)] > 1:
                raise ValueError(
                    f"{name!r} is adapted and its weight is tied to another module's: merged, the "
                    "two would differ. Export the adapter, or untie them first."
                )
            a, b = plain_factors(name, layer, adapter_name)
            view.merge(layer, a, b, layer.scaling[adapter_name])
        with whole_folder(folder) as filling:
            base.save_pretrained(filling, state_dict=_without_adapters(base, layers))
            if tokenizer is not None:
                tokenizer.save_pretrained(filling)
    return Path(folder)


def _without_adapters(base: PreTrainedModel, layers: Any) -> dict[str, Tensor]:
    """The model's tensors under the names that they have without PEFT."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        inside = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if inside is None:
            tensors[name] = tensor
        elif name.startswith(f"{inside}.base_layer."):
            tensors[name.replace(f"{inside}.base_layer.", f"{inside}.", 1)] = tensor
    return tensors
