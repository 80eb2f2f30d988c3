"""The lower layers of a decoder, run once for several passes over the same tokens.

Below the lowest linear that trains nothing changes between the passes of a rollout (log-probs
before the update, each of mu updates, the reference): what enters the first layer above is kept,
and every pass starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Trunk:
    """What enters one layer.

    Args:
        depth: Index of that layer; the ``depth`` layers below it need not run.
        hidden: [1, S, D], without gradient.
    """

    depth: int
    hidden: Tensor


def layers_of(base: nn.Module) -> Sequence[nn.Module]:
    """The decoder's layers in order: its one list of as many modules as the config counts."""
    num_layers = base.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    lists = [
        module
        for module in base.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if len(lists) != 1:
        raise ValueError(f"{type(base).__name__} has {len(lists)} lists of {num_layers} layers.")
    return list(lists[0])


@contextmanager
def kept_at(layers: Sequence[nn.Module], depth: int) -> Iterator[list[Tensor]]:
    """While inside, a forward ends below layer ``depth``; what would enter it is appended."""
    found: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        found.append(hidden.detach())
        return hidden

    with _replaced({layers[depth]: keep, **dict.fromkeys(layers[depth + 1 :], _same)}):
        yield found


@contextmanager
def started_from(layers: Sequence[nn.Module], trunk: Trunk | None) -> Iterator[None]:
    """While inside, a forward starts at the trunk's layer; from the bottom where it is None."""
    if trunk is None:
        yield
        return
    below = dict.fromkeys(layers[: trunk.depth], _same)
    with _replaced({**below, layers[trunk.depth - 1]: lambda _: trunk.hidden}):
        yield


def _same(hidden: Tensor) -> Tensor:
    return hidden


@contextmanager
def _replaced(forwards: dict[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Decoder layers of transformers take the states first, and give the states back."""
    for layer, forward in forwards.items():

        def replacement(
            hidden_states: Tensor, *_: Any, forward: Callable[[Tensor], Tensor] = forward, **__: Any
        ) -> Tensor:
            return forward(hidden_states)

        layer.forward = replacement
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward
