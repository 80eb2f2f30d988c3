"""Keys and values of all rows that are sampled together, in buffers made once.

The stock cache concatenates at every token: it copies all that it holds, 100 times a completion.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class BufferedLayer(DynamicLayer):
    """Keys and values of one layer, as views into buffers [B, H_kv, capacity, D].

    Layers with a sliding window keep all tokens as well; their mask hides the old ones.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.buffers is None:  # the prompts
            return super().update(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        # A token beyond would be dropped without a word: one broadcasts to none.
        assert end <= self.buffers[0].shape[2], "spread() makes the room"
        views = []
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
            views.append(buffer[:, :, :end])
        self.keys, self.values = views
        return self.keys, self.values

    def spread(self, rows: Tensor, num_new: int) -> None:
        """Hold these rows of the prompts, with room for ``num_new`` tokens."""
        length = self.get_seq_length()
        buffers = []
        for states in (self.keys, self.values):
            assert states is not None, "the prompts come first"
            shape = (len(rows), states.shape[1], length + num_new, states.shape[3])
            buffer = states.new_empty(shape)
            buffer[:, :, :length] = states[rows]
            buffers.append(buffer)
        self.buffers = (buffers[0], buffers[1])
        self.keys, self.values = (buffer[:, :, :length] for buffer in buffers)

    def keep(self, rows: Tensor) -> None:
        """Let go of all other rows; ``rows`` ascend."""
        assert self.buffers is not None
        length = self.get_seq_length()
        for buffer in self.buffers:
            buffer[: len(rows), :, :length] = buffer[rows, :, :length]
        self.buffers = (self.buffers[0][: len(rows)], self.buffers[1][: len(rows)])
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


def new_cache(config: Any) -> DynamicCache:
    """An empty cache for a model; layers with recurrent or convolutional states keep their own."""
    cache = DynamicCache(config=config)
    cache.layers = [
        BufferedLayer() if type(layer) in {DynamicLayer, DynamicSlidingWindowLayer} else layer
        for layer in cache.layers
    ]
    return cache


def spread(cache: DynamicCache, rows: Tensor, num_new: int) -> None:
    """From the prompts to the completions: row ``i`` goes on from prompt ``rows[i]``."""
    for layer in cache.layers:
        if isinstance(layer, BufferedLayer):
            layer.spread(rows, num_new)
        else:
            layer.reorder_cache(rows)  # type: ignore[arg-type]  # any integers do


def keep(cache: DynamicCache, rows: Tensor) -> None:
    """Let go of all rows but these, in ascending order."""
    for layer in cache.layers:
        if isinstance(layer, BufferedLayer):
            layer.keep(rows)
        else:
            layer.reorder_cache(rows)  # type: ignore[arg-type]  # any integers do
