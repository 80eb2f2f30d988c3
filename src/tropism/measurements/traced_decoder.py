"""A decoder of transformers taken apart: its layers, their MLPs and attentions, its head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tropism.forward.trunk import layers_of
from tropism.measurements.facts import TokenizedFact

Part = Literal["mlp", "attention"]
NAMES: dict[Part, tuple[str, ...]] = {
    "mlp": ("mlp", "feed_forward", "ffn", "block_sparse_moe"),
    "attention": ("self_attn", "attn", "attention", "self_attention"),
}
"""What families call these modules within a layer."""


class TracedDecoder:
    """A decoder of transformers, taken apart at its layers.

    Args:
        base: The causal LM, in evaluation mode; it computes in the dtype that it was loaded in.
        head: [N, D] last hidden states -> [N, V] logits.

    Raises:
        ValueError: A layer does not have one MLP and one attention that are known by name.
    """

    def __init__(self, base: Any, head: Callable[[Tensor], Tensor]) -> None:
        self.decoder = base.get_decoder()
        self.embedding: nn.Module = base.get_input_embeddings()
        self.head = head
        self.layers = layers_of(base)
        self.parts: dict[Part, list[nn.Module]] = {
            part: [layer.get_submodule(part_name(layer, part)) for layer in self.layers]
            for part in NAMES
        }

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.embedding.parameters()).device
        return device

    def embed(self, ids: Iterable[int]) -> Tensor:
        """[T, D] what the embedding gives for these tokens, scaled where the family scales it."""
        with torch.no_grad():
            embedded: Tensor = self.embedding(torch.tensor([list(ids)], device=self.device))[0]
        return embedded

    def final_states(self, ids: Sequence[int], num_rows: int) -> Tensor:
        """[num_rows, D] last hidden states of the last token, the prompt in every row."""
        rows = torch.tensor([list(ids)], device=self.device).expand(num_rows, -1)
        states: Tensor = self.decoder(input_ids=rows, use_cache=False).last_hidden_state
        return states[:, -1]


def part_name(layer: nn.Module, part: Part) -> str:
    """The name by which a layer knows its MLP or attention.

    Raises:
        ValueError: It has none that is known, or several.
    """
    children = [name for name, _ in layer.named_children()]
    found = [name for name in children if name in NAMES[part]]
    if len(found) != 1:
        raise ValueError(
            f"{type(layer).__name__} has {children}: tracing looks for one {part} called "
            f"{' or '.join(NAMES[part])}. Models without have no windows of it to restore."
        )
    return found[0]


def subject_deviation(decoder: TracedDecoder, facts: Sequence[TokenizedFact]) -> float:
    """Standard deviation of the embeddings of all subjects' tokens, over tokens and features."""
    embedded = [decoder.embed(fact.ids[fact.start : fact.end]) for fact in facts]
    return float(torch.cat(embedded).float().std())
