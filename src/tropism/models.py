"""Loads a policy: weights, tokenizer, EOS set, and a LoRA superset on every linear.

Linears are discovered in the loaded model, never named in advance, so that a new family needs
no entry here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tropism import weights
from tropism.forward import attention
from tropism.forward.adapted_linear import AdaptedLinear
from tropism.forward.lean_modules import use_lean_modules
from tropism.lora.export import load_adapter_tensors
from tropism.measurements.layer_names import LinearSite, name_sites
from tropism.policy import ADAPTER, Policy

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Model:
    """Which weights to start from.

    Args:
        name: An alias (``smollm2-135m-instruct``, ``gemma-3-270m``, ``organism``), a local
            folder (also the folder of a full-parameter run), a ``.gguf`` file, or a hub id.
        dtype: Of the base weights; adapters always have fp32 masters.
        adapter: Folder of an existing LoRA adapter to start from, or of a run (``sft`` before
            ``grpo``, say). Its policy, not the bare base, is then the reference of the KL term.
        revision: Hub revision (branch, tag or commit).
        chat_template: For tokenizers without one: ``plain`` (``user: ...``), or a Jinja file.
        gradient_checkpointing: Recompute each layer in the backward pass; saves memory.
    """

    name: str = "smollm2-135m-instruct"
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    adapter: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class LoRA:
    """The adapters put on every linear but the head.

    Args:
        rank: R.
        alpha: The update is scaled by alpha / rank, which must be a power of two: only then is
            the exported adapter, with the scaling folded in, exactly the trained one in bf16.
        dropout: On the adapters' inputs, in training only. Sampling and training then see
            different policies, so 0 is the right value for most runs.
        modules: Labels of the modules that carry LoRA (``q_proj``, ``down_proj``, ...); all
            linears where null.
        layers: Layers that carry LoRA, all where null.
        compute: In which dtype adapters multiply: ``base`` is the model's (bf16, as autocast would;
            faster), ``float32`` PEFT's own way. Masters are fp32 either way.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    modules: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    compute: Literal["base", "float32"] = "base"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: give a rank of at least 1.")
        ratio = self.alpha / self.rank
        if ratio <= 0 or math.frexp(ratio)[0] != 0.5:
            raise ValueError(
                f"lora.alpha={self.alpha} / lora.rank={self.rank} = {ratio:g} is not a power of "
                f"two; use alpha={self.rank} or alpha={2 * self.rank}."
            )

    def select(self, sites: tuple[LinearSite, ...]) -> list[LinearSite]:
        """The sites that carry LoRA.

        Raises:
            ValueError: A module or layer that the model does not have.
        """
        known_modules = {site.module for site in sites}
        known_layers = {site.layer for site in sites}
        if unknown := set(self.modules or ()) - known_modules:
            raise ValueError(
                f"lora.modules={sorted(unknown)}: the model has no such linear; it has "
                f"{sorted(known_modules)}. Fused projections can only be adapted whole."
            )
        if unknown_layers := set(self.layers or ()) - known_layers:
            raise ValueError(
                f"lora.layers={sorted(unknown_layers)}: the model has layers 0 to "
                f"{max(layer for layer in known_layers if layer is not None)}."
            )
        selected = [
            site
            for site in sites
            if (self.modules is None or site.module in self.modules)
            and (self.layers is None or site.layer in self.layers)
        ]
        if not selected:
            raise ValueError(
                f"lora.modules={self.modules}, lora.layers={self.layers}: no linear is left to "
                "adapt. Give at least one of each, or null for all."
            )
        return selected


def load_policy(model: Model, lora: LoRA | None) -> Policy:
    """Load weights, put LoRA on them (or free every weight where ``lora`` is None).

    Raises:
        ValueError: Unknown model, a tokenizer with more tokens than the model has embeddings, an
            adapter that does not fit, or a head that this project cannot split from its decoder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if model.adapter is not None and lora is None:
        raise ValueError(
            f"model.adapter={model.adapter!r} with lora=null: full-parameter training cannot "
            "start from an adapter; set `lora`, or merge the adapter into a folder first."
        )
    adapter = None
    if model.adapter is not None:
        adapter = load_adapter_tensors(_of_run(model.adapter, "adapter"))
    folder = weights.resolve(_of_run(model.name, "model"), revision=model.revision)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if model.chat_template is not None:
        tokenizer.chat_template = _chat_template(model.chat_template)
    transformers_logging.disable_progress_bar()  # a second of loading needs no bar
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, model.dtype), attn_implementation=attention.register()
    )
    _disable_dropout(base)
    _check_vocabulary(base, tokenizer, model.name)
    sites = find_linears(base)
    network: nn.Module = base
    starting: dict[str, tuple[Tensor, Tensor]] = {}
    if lora is None:
        base.requires_grad_(True)
    else:
        network = _inject(base, [site.name for site in lora.select(sites)], lora)
        if adapter is not None:
            starting = _start_from(network, adapter[1], sites, lora, model.adapter or "")
        use_lean_modules(base, is_checkpointed=model.gradient_checkpointing)
    if model.gradient_checkpointing:
        # The reentrant kind gives silently wrong gradients once adapters are toggled.
        base.gradient_checkpointing_enable({"use_reentrant": False})
        # The other kind needs embeddings with gradients; here they would only carry the backward
        # down through all layers, also those below the lowest adapter that trains.
        base.disable_input_require_grads()
    policy = Policy(
        network,
        tokenizer,
        sites=sites,
        eos_token_ids=_eos_token_ids(base, tokenizer),
        context_length=_context_length(base, tokenizer),
        starting_adapters=starting,
        source=str(folder),
        provenance=weights.source_of(folder),
    )
    network.eval()
    _check_head(policy)
    network.train()
    return policy


def identity(model: Model, policy: Policy) -> dict[str, Any]:
    """Which policy this is: its settings, where the weights came from, the adapter's SHA-256."""
    adapter = None
    if model.adapter is not None:
        folder = Path(model.adapter)
        files = [*folder.glob("adapter_model.*"), *folder.glob("adapter/adapter_model.*")]
        adapter = weights.sha256_of(files[0])
    settings = {
        name: getattr(model, name)
        for name in ("name", "revision", "adapter", "dtype", "chat_template")
    }
    return {**settings, "source": policy.provenance, "adapter_sha256": adapter}


def _of_run(name: str, part: str) -> str:
    """What a run exported, where ``name`` is its folder; else ``name``."""
    exported = Path(name) / part
    is_run = (Path(name) / "run.json").is_file() and exported.is_dir()
    return str(exported) if is_run else name


def find_linears(base: nn.Module) -> tuple[LinearSite, ...]:
    """Every linear of the model except the output head (which may be tied to the embeddings)."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's transposed linear

    head = base.get_output_embeddings()  # type: ignore[operator]
    return name_sites(
        [
            name
            for name, module in base.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        ]
    )


def _disable_dropout(base: nn.Module) -> None:
    """No dropout in the base: the sampler has none, and the trainer must see the same policy.

    With it, an unchanged policy has ratios off 1 and a KL above 0 to itself. Families keep it in
    modules or in plain attributes of their attention.
    """
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "hidden_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _inject(base: nn.Module, names: list[str], lora: LoRA) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=names,
        fan_in_fan_out=not any(isinstance(base.get_submodule(n), nn.Linear) for n in names),
        task_type="CAUSAL_LM",
    )
    if lora.compute == "base":
        config._register_custom_module({nn.Linear: AdaptedLinear})
    return get_peft_model(base, config, adapter_name=ADAPTER)


def _start_from(
    network: nn.Module,
    tensors: dict[str, tuple[Tensor, Tensor, float]],
    sites: tuple[LinearSite, ...],
    lora: LoRA,
    folder: str,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Copy an existing adapter into the injected one, its rank padded and its scaling folded."""
    base = network.get_base_model()  # type: ignore[operator]
    scaling = lora.alpha / lora.rank
    known = {site.name for site in lora.select(sites)}
    starting = {}
    for name, (a, b, factor) in tensors.items():
        if name not in known:
            raise ValueError(
                f"model.adapter={folder!r} adapts {name!r}, where this run puts no LoRA: leave "
                "lora.modules and lora.layers null, or use the base that it was trained on."
            )
        layer = base.get_submodule(name)
        weight_a, weight_b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if a.shape[0] > lora.rank:
            raise ValueError(
                f"model.adapter={folder!r} has rank {a.shape[0]} at {name!r}; raise lora.rank "
                f"from {lora.rank} to at least that."
            )
        if a.shape[1] != weight_a.shape[1] or b.shape[0] != weight_b.shape[0]:
            raise ValueError(
                f"model.adapter={folder!r}: {name!r} maps {a.shape[1]} to {b.shape[0]} features, "
                f"the model's {weight_a.shape[1]} to {weight_b.shape[0]}: another base model?"
            )
        with torch.no_grad():
            # Components beyond its rank keep the random A and a zero B: nothing changes.
            weight_a[: a.shape[0]] = a
            weight_b[:, : a.shape[0]] = b * (factor / scaling)
        starting[name] = (weight_a.detach().clone(), weight_b.detach().clone())
    return starting


def _chat_template(value: str) -> str:
    if value == "plain":
        return PLAIN_TEMPLATE
    path = Path(value)
    if not path.is_file():
        raise ValueError(f"model.chat_template={value!r}: neither `plain` nor an existing file.")
    return path.read_text(encoding="utf-8")


def _check_vocabulary(base: Any, tokenizer: Any, name: str) -> None:
    num_embeddings = base.get_input_embeddings().num_embeddings
    highest = max(tokenizer.get_vocab().values())
    if highest >= num_embeddings:
        raise ValueError(
            f"model.name={name!r}: its tokenizer has token id {highest}, and the model only "
            f"{num_embeddings} embeddings. Use the tokenizer that the weights were trained with."
        )


def _eos_token_ids(base: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a completion: the tokenizer's and every one of the generation config."""
    configured = getattr(base.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    ids = [*ids, tokenizer.eos_token_id]
    return frozenset(int(i) for i in ids if i is not None)


def _context_length(base: Any, tokenizer: Any) -> int:
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    return int(min(limit or 1 << 30, tokenizer.model_max_length))


def _check_head(policy: Policy) -> None:
    """The head applied to the decoder's output must give the model's own logits."""
    ids = torch.arange(3, 7)[None] % policy.base.get_input_embeddings().num_embeddings
    with torch.no_grad():
        expected = policy.base(input_ids=ids, use_cache=False).logits
        hidden = policy.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        found = policy.head(hidden)
    if not torch.allclose(found.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"model {policy.source!r} ({type(policy.base).__name__}) changes its logits after "
            "the output head in a way this version does not know; training it would be wrong."
        )
