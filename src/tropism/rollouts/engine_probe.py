"""What an engine's linears answer to a fixed input: proof of what it holds, on any kernel.

Engines repack weights until they cannot be read back. So each linear is asked instead: its answer
to one fixed random row depends on every weight, and must be that of the weights sent. All of this
takes vLLM's modules as they come, imports no vLLM, and returns plain tensors by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

WRAPPED = ".base_layer"  # what vLLM's LoRA puts behind the name of a linear
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest relative error of an answer: another kernel rounds and sums otherwise."""


def probe(num_inputs: int, dtype: torch.dtype) -> Tensor:
    """[1, num_inputs] the same random row each time, on the CPU."""
    generator = torch.Generator().manual_seed(num_inputs)
    return torch.randn(1, num_inputs, generator=generator).to(dtype)


def names(model: nn.Module) -> list[str]:
    """The linears of a vLLM model."""
    return [name for name, _ in _linears(model)]


def packed(model: nn.Module) -> dict[str, list[str]]:
    """Name of a module in which a vLLM model keeps several linears -> their names, in order."""
    return dict(getattr(model, "packed_modules_mapping", {}))


@torch.no_grad()
def answers(model: nn.Module, wanted: Collection[str] | None = None) -> dict[str, Tensor]:
    """[1, N] fp32 on the CPU of each linear (all where None): what it makes of ``probe``."""
    return {name: _answer(linear) for name, linear in _linears(model, wanted)}


def fingerprints(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each linear's answer."""
    return {
        name: hashlib.sha256(answer.numpy().tobytes()).hexdigest()
        for name, answer in answers(model).items()
    }


@torch.no_grad()
def adapter_answers(worker: Any, adapter_id: int) -> dict[str, Tensor]:
    """[1, N] fp32 on the CPU of each LoRA layer: what an adapter adds there to ``probe``.

    Args:
        worker: vLLM's, which holds the adapter.
        adapter_id: Its number.
    """
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(adapter_id)
    found = {}
    for name, layer in manager.modules.items():
        if not isinstance(layer.lora_a_stacked, tuple):
            continue  # embeddings and the head, where no adapter ever is
        sides = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        x = probe(layer.base_layer.input_size, layer.lora_a_stacked[0].dtype).float()
        parts = [x @ a[slot, 0].cpu().float().T @ b[slot, 0].cpu().float().T for a, b in sides]
        found[name] = torch.cat(parts, dim=1)
    return found


def require_same(name: str, found: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    """Refuse an engine whose linear does not compute with the weights that it was sent.

    Args:
        name: Of the engine's linear.
        found: [1, N] its answer; None where it has no such linear.
        expected: [1, N] what the weights sent make of ``probe``.
        dtype: Of the engine's weights.

    Raises:
        RuntimeError: They differ by more than rounding.
    """
    error = float("inf")
    if found is not None and found.shape == expected.shape:
        scale = max(float(expected.norm()), 1e-30)
        error = float((found - expected.cpu()).norm()) / scale
    if not error <= TOLERANCE[dtype]:
        raise RuntimeError(
            f"after the weight sync vLLM's {name!r} does not compute with the weights sent "
            f"(relative error {error:.3g}): it would sample from another policy. Leave `engine` "
            "out, or try the other engine.sync."
        )


def _linears(model: nn.Module, wanted: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
    for full_name, module in model.named_modules():
        name = full_name.removesuffix(WRAPPED)
        is_linear = hasattr(module, "quant_method") and hasattr(module, "output_size")
        is_other = hasattr(module, "base_layer") or hasattr(module, "num_embeddings")
        if is_linear and not is_other and (wanted is None or name in wanted):
            yield name, module


def _answer(linear: Any) -> Tensor:
    device = next((tensor.device for tensor in linear.parameters()), torch.device("cpu"))
    x = probe(linear.input_size, linear.params_dtype).to(device)
    found: Tensor = linear.quant_method.apply(linear, x, linear.bias)
    return found.float().cpu()
