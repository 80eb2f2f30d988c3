"""The policy: a decoder with its adapters, seen as GRPO needs it.

It knows which linears carry LoRA and with what intent, runs the training forward, and shows the
same weights in two other lights without touching the trainable ones: *merged* for sampling, and
as the *reference* of the KL term (the starting policy, unless it is refreshed).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tropism.forward import attention
from tropism.forward.packed_linear import can_pack
from tropism.forward.trunk import Trunk, kept_at, layers_of, started_from
from tropism.lora.export import export_full, export_portable
from tropism.lora.export_compact import export_compact
from tropism.lora.export_merged import export_merged
from tropism.lora.views import View
from tropism.measurements.layer_names import LinearSite
from tropism.objective.logprobs import selected_logprobs
from tropism.prompt_encoding import encode_answer, encode_prompt
from tropism.types import MicroBatch, Pack, Prompt

ADAPTER = "default"


@dataclass(frozen=True)
class Adapter:
    """LoRA factors of one linear: the weight in use is W_0 + scaling * b @ a.

    Args:
        a: [R, d_in] fp32.
        b: [d_out, R] fp32.
        scaling: A power of two.
    """

    a: nn.Parameter
    b: nn.Parameter
    scaling: float


class Policy:
    """A loaded decoder, its tokenizer and its adapters; made by ``tropism.models.load_policy``.

    Args:
        model: A causal LM, wrapped by PEFT where LoRA is used.
        tokenizer: Its tokenizer.
        sites: Every linear inside the model but the head.
        eos_token_ids: All tokens that end a completion.
        context_length: Most tokens that prompt and completion may have together.
        starting_adapters: site name -> (A_0, B_0) where the run starts from an existing adapter.
        source: The name or folder by which PEFT finds the base again.
        provenance: Where the weights came from, revision and hash, for ``run.json``.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        sites: Sequence[LinearSite],
        eos_token_ids: frozenset[int],
        context_length: int,
        starting_adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        source: str = "",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sites = tuple(sites)
        self.eos_token_ids = eos_token_ids
        self.context_length = context_length
        self.source = source
        self.provenance = dict(provenance or {})
        self.uses_lora = isinstance(model, PeftModel)
        self.base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._starting_adapters = dict(starting_adapters or {})
        self._reference = dict(self._starting_adapters)
        self._reference_weights: dict[str, Tensor] | None = None
        self._starting_weights: dict[str, Tensor] | None = None

    # -- parameters ---------------------------------------------------------------------------

    def adapter(self, site: LinearSite) -> Adapter | None:
        """The LoRA factors at ``site``, or None where it has none."""
        layer = self.lora_layer(site)
        if layer is None:
            return None
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        assert isinstance(a, nn.Parameter)
        assert isinstance(b, nn.Parameter)
        return Adapter(a, b, layer.scaling[ADAPTER])

    def lora_layer(self, site: LinearSite) -> LoraLayer | None:
        """PEFT's layer at ``site``, or None where it has no adapter."""
        layer = self.base.get_submodule(site.name)
        return layer if isinstance(layer, LoraLayer) and ADAPTER in layer.lora_A else None

    def linear(self, site: LinearSite) -> nn.Module:
        """The base linear at ``site``, without its adapter."""
        layer = self.base.get_submodule(site.name)
        base: nn.Module = layer.get_base_layer() if isinstance(layer, LoraLayer) else layer
        return base

    def weight(self, site: LinearSite) -> Tensor:
        """The base weight at ``site``, detached; [d_out, d_in], or its transpose in GPT-2."""
        return self.linear(site).get_parameter("weight").detach()

    def starting_adapter(self, site: LinearSite) -> tuple[Tensor, Tensor] | None:
        """(A_0, B_0) of the adapter that the run started from; None means B_0 = 0."""
        return self._starting_adapters.get(site.name)

    def named_trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, decided by name and never read off ``requires_grad``.

        Toggling adapters changes ``requires_grad`` (peft#3447); names do not move.
        """
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not self.uses_lora or f"lora_A.{ADAPTER}" in name or f"lora_B.{ADAPTER}" in name
        }

    def num_trainable(self) -> int:
        """Number of trainable scalars."""
        return sum(parameter.numel() for parameter in self.named_trainable().values())

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    # -- text ---------------------------------------------------------------------------------

    @property
    def pad_token_id(self) -> int:
        """Fills padded positions; never attended to and never in a loss, so EOS will do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self.eos_token_ids)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt as the model is to see it, with BOS exactly once where it is due.

        Raises:
            ValueError: Chat messages, and the tokenizer has no chat template.
        """
        return encode_prompt(self.tokenizer, prompt, source=self.source)

    def encode_completion(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` as the model should have written it behind ``prompt``, with EOS."""
        return encode_answer(self.tokenizer, prompt, text, eos_token_ids=self.eos_token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    # -- forward ------------------------------------------------------------------------------

    def head(self, hidden: Tensor) -> Tensor:
        """[N, D] last hidden states -> [N, V] logits, as the family makes them."""
        logits: Tensor = self.base.get_output_embeddings()(hidden)
        config = self.base.config.get_text_config()
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (scale := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    def completion_logprobs(
        self,
        batch: MicroBatch | Pack,
        *,
        temperature: float,
        should_train_entropy: bool = False,
        trunk: Trunk | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the completion tokens and the entropy at each, under the policy.

        Args:
            batch: A pack, or completions of one prompt, which then runs in each row, so that what
                flows back to it is known row by row (for probes).
            temperature: The log-probabilities are taken at it.
            should_train_entropy: Whether the entropies are differentiable.
            trunk: Where to start, from ``trunk`` on the same batch.

        Returns:
            Two [M, T] fp32 tensors, 0 where ``batch.mask`` is False; the first is differentiable,
            the second where ``should_train_entropy``.
        """
        hidden = self.completion_states(batch, trunk)  # (N, D)
        logprobs, entropy = selected_logprobs(
            hidden,
            batch.targets[batch.mask],
            head=self.head,
            temperature=temperature,
            is_head_frozen=self.uses_lora,
            should_train_entropy=should_train_entropy,
        )
        empty = torch.zeros(batch.mask.shape, device=hidden.device)
        return (
            empty.masked_scatter(batch.mask, logprobs),
            empty.masked_scatter(batch.mask, entropy),
        )

    def completion_states(self, batch: MicroBatch | Pack, trunk: Trunk | None = None) -> Tensor:
        """[N, D] last hidden states that predict the completion tokens, row by row."""
        decoder = self.base.get_decoder()
        if isinstance(batch, Pack):
            with started_from(self._layers, trunk):
                states: Tensor = self._run_pack(batch)
            return states[batch.predicts]
        prompt = batch.prompt.expand(len(batch.rows), -1)
        input_ids = torch.cat([prompt, batch.targets[:, :-1]], dim=1)
        output = decoder(input_ids=input_ids, use_cache=False)
        hidden: Tensor = output.last_hidden_state[:, batch.prompt.numel() - 1 :]  # (M, T, D)
        return hidden[batch.mask]

    def _run_pack(self, pack: Pack) -> Tensor:
        """[S, D] last hidden states."""
        output = self.base.get_decoder()(
            input_ids=pack.input_ids[None],
            position_ids=pack.position_ids[None],
            attention_mask=_no_mask(pack.mask.device),
            groups=pack.groups,
            use_cache=False,
        )
        states: Tensor = output.last_hidden_state[0]
        return states

    def trunk(self, batch: MicroBatch | Pack, depth: int) -> Trunk | None:
        """Run the layers below ``depth`` on a pack, for several passes to start from.

        Args:
            batch: What the passes run on.
            depth: Lowest layer in which something differs between the passes.

        Returns:
            None where there is nothing to share: depth 0, or no pack.
        """
        if depth <= 0 or not isinstance(batch, Pack):
            return None
        with torch.no_grad(), kept_at(self._layers, depth) as found:
            self._run_pack(batch)
        return Trunk(depth, found[0])

    @cached_property
    def _layers(self) -> Sequence[nn.Module]:
        return layers_of(self.base)

    def lowest_layer(self, sites: Iterable[LinearSite]) -> int:
        """The lowest layer that holds one of these linears; the top one where there are none."""
        top = len(self._layers) - 1
        return min((top if site.layer is None else site.layer for site in sites), default=top)

    def unlike_reference(self) -> Iterator[LinearSite]:
        """Linears at which policy and reference differ now."""
        for site, _ in self._lora_layers():
            adapter, kept = self.adapter(site), self._reference.get(site.name)
            assert adapter is not None
            if kept is None:
                differs = bool(adapter.b.detach().any())
            else:
                differs = not (torch.equal(adapter.a, kept[0]) and torch.equal(adapter.b, kept[1]))
            if differs:
                yield site

    @cached_property
    def can_pack(self) -> bool:
        """Whether completions laid end to end stay apart in this model.

        Not where layers carry recurrent or convolutional states from token to token, nor where
        attention is not called as transformers' interface has it, or has terms of its own.
        """
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        layers = DynamicCache(config=self.base.config).layers
        # Not isinstance: layers with recurrent states inherit from these.
        if any(type(layer) not in {DynamicLayer, DynamicSlidingWindowLayer} for layer in layers):
            return False
        text = self.base.config.get_text_config()
        if text._attn_implementation != attention.NAME:
            return False
        return getattr(text, "attn_logit_softcapping", None) is None

    # -- the same weights in another light ----------------------------------------------------

    def _lora_layers(self) -> Iterator[tuple[LinearSite, LoraLayer]]:
        for site in self.sites:
            layer = self.lora_layer(site)
            if layer is not None:
                yield site, layer

    @contextmanager
    def merged(self, *, num_rows: int | None = None) -> Iterator[None]:
        """The base computes with W_0 + scaling * B A while inside; for sampling only.

        Args:
            num_rows: Rows of the products, for which weights are packed where that is faster.
        """
        with View() as view:
            with torch.no_grad():
                for site in self.sites:
                    layer, adapter = self.lora_layer(site), self.adapter(site)
                    if layer is not None and adapter is not None:
                        view.merge(
                            layer,
                            adapter.a.data,
                            adapter.b.data,
                            adapter.scaling,
                            num_rows=num_rows,
                        )
                    elif num_rows is not None:
                        _pack(view, self.linear(site), num_rows)
                if num_rows is not None:
                    _pack(view, self.base.get_output_embeddings(), num_rows)
            yield

    def keep_reference(self) -> None:
        """Keep the policy of now as the reference.

        Without it the reference of a LoRA run is the starting policy, at no cost: the base, or the
        adapter that the run started from. A full-parameter run needs it once, before training.
        """
        if self.uses_lora:
            for site, _ in self._lora_layers():
                adapter = self.adapter(site)
                assert adapter is not None
                self._reference[site.name] = (
                    adapter.a.detach().clone(),
                    adapter.b.detach().clone(),
                )
        else:
            self._reference_weights = {
                name: parameter.detach().clone()
                for name, parameter in self.named_trainable().items()
            }

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The reference of the KL term while inside."""
        with View() as view:
            if self.uses_lora:
                self._show_adapters(view, self._reference)
            else:
                assert self._reference_weights is not None, "keep_reference() comes first"
                self._show_weights(view, self._reference_weights)
            yield

    def _show_adapters(self, view: View, adapters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for site, layer in self._lora_layers():
            kept, adapter = adapters.get(site.name), self.adapter(site)
            if kept is None or adapter is None:
                view.disable(layer)
            else:
                view.show(adapter.a, kept[0])
                view.show(adapter.b, kept[1])

    def _show_weights(
        self, view: View, weights: Mapping[str, Tensor], *, of: nn.Module | None = None
    ) -> None:
        wanted = set(self.model.parameters() if of is None else of.parameters())
        for name, parameter in self.named_trainable().items():
            if parameter in wanted:
                view.show(parameter, weights[name])

    def keep_start(self) -> None:
        """Keep the weights of now, in CPU memory, as those that the run starts from.

        Without it a LoRA run knows its start, at no cost. A full-parameter run needs it before
        training wherever ``starting`` is to be asked for; a second call changes nothing.
        """
        if not self.uses_lora and self._starting_weights is None:
            self._starting_weights = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in self.named_trainable().items()
            }

    @property
    def knows_start(self) -> bool:
        """Whether ``starting`` can be shown."""
        return self.uses_lora or self._starting_weights is not None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """The starting policy while inside, also where the reference has moved on.

        It is the base, or the adapter that the run started from.
        """
        with View() as view:
            if self.uses_lora:
                self._show_adapters(view, self._starting_adapters)
            else:
                assert self._starting_weights is not None, "keep_start() comes first"
                self._show_weights(view, self._starting_weights)
            yield

    def starting_head(self, hidden: Tensor) -> Tensor:
        """``head`` of the starting policy."""
        with View() as view:
            if not self.uses_lora:  # which never touches the head
                assert self._starting_weights is not None, "keep_start() comes first"
                head: nn.Module = self.base.get_output_embeddings()
                self._show_weights(view, self._starting_weights, of=head)
            return self.head(hidden)

    def reference_state(self) -> dict[str, Any]:
        """What a checkpoint must hold of a reference that was refreshed."""
        return {"adapters": self._reference, "weights": self._reference_weights}

    def load_reference_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``reference_state`` gave."""
        self._reference, self._reference_weights = dict(state["adapters"]), state["weights"]

    def export(self, run_folder: Path, *, should_merge: bool = False) -> Path:
        """Write what a run leaves behind.

        LoRA: ``adapter/`` (exactly the trained logits, with stock PEFT or vLLM) and
        ``adapter_compact/`` (only the components in use); also ``model/``, the whole model with
        the adapter merged in, where ``should_merge``. Full-parameter training: ``model/``.

        Returns:
            ``adapter/`` or ``model/``.
        """
        if not isinstance(self.model, PeftModel):
            return export_full(self.base, self.tokenizer, run_folder / "model")
        options = {"base_model_name_or_path": self.source}
        export_compact(self.model, run_folder / "adapter_compact", **options)
        if should_merge:
            export_merged(self.model, self.tokenizer, run_folder / "model")
        return export_portable(self.model, run_folder / "adapter", **options)


def _pack(view: View, module: nn.Module, num_rows: int) -> None:
    if isinstance(module, nn.Linear) and can_pack(module.weight):
        view.pack(module, num_rows=num_rows)


def _no_mask(device: torch.device) -> Tensor:
    """Keeps transformers from building a mask over a whole pack; its layout says more."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
