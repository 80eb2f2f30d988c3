"""The buffered cache against the stock one, token by token, with rows that leave on the way."""

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, Lfm2Config, LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tropism.rollouts import kv_cache
from tropism.rollouts.kv_cache import BufferedLayer

SIZES = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_attention_heads": 4}
ROWS = torch.tensor([0, 0, 1, 1, 2, 2])  # two completions of each of three prompts
LEAVE = {1: [0, 2, 3, 5], 3: [1, 3], 4: [1]}  # step -> those of the rows that go on after it
NUM_STEPS = 6


def states(num_rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_rows, 2, length, 4, generator=generator)


def filled(cache, length=5):
    for layer in range(len(cache.layers)):
        cache.update(*states(3, length, layer), layer)
    return cache


def test_equals_the_stock_cache_while_rows_leave():
    buffered = filled(kv_cache.new_cache(LlamaConfig(**SIZES)))
    stock = filled(DynamicCache(config=LlamaConfig(**SIZES)))
    assert [type(layer) for layer in buffered.layers] == [BufferedLayer] * 3
    kv_cache.spread(buffered, ROWS, NUM_STEPS)
    stock.reorder_cache(ROWS)
    num_rows = len(ROWS)
    for step in range(NUM_STEPS):
        for layer in range(3):
            new = states(num_rows, 1, 10 * step + layer)
            found, expected = buffered.update(*new, layer), stock.update(*new, layer)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert buffered.get_seq_length() == stock.get_seq_length() == 5 + step + 1
        assert buffered.get_mask_sizes(1, 0) == stock.get_mask_sizes(1, 0)
        if step in LEAVE:
            rows = torch.tensor(LEAVE[step])
            kv_cache.keep(buffered, rows)
            stock.reorder_cache(rows)
            num_rows = len(rows)
        for one, other in zip(buffered.layers, stock.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_nothing_moves_once_there_is_room():
    cache = filled(kv_cache.new_cache(LlamaConfig(**SIZES)))
    kv_cache.spread(cache, ROWS, NUM_STEPS)
    layer = cache.layers[0]
    places = [layer.keys.data_ptr(), layer.values.data_ptr()]
    for step in range(NUM_STEPS):
        cache.update(*states(len(ROWS), 1, step), 0)
        assert [layer.keys.data_ptr(), layer.values.data_ptr()] == places
    kv_cache.keep(cache, torch.tensor([2, 4]))
    assert [layer.keys.data_ptr(), layer.values.data_ptr()] == places
    with pytest.raises(AssertionError, match="makes the room"):
        cache.update(*states(2, 1, 0), 0)


def test_sliding_windows_keep_all_and_say_so_to_the_mask():
    config = Gemma3TextConfig(
        **SIZES,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    stock = DynamicCache(config=config)
    assert [type(layer) for layer in stock.layers] == [
        DynamicSlidingWindowLayer, DynamicLayer, DynamicSlidingWindowLayer
    ]  # fmt: skip
    cache = filled(kv_cache.new_cache(config))
    kv_cache.spread(cache, ROWS, 1)
    keys, _ = cache.update(*states(len(ROWS), 1, 9), 0)
    assert keys.shape[2] == 6
    assert torch.equal(keys[:, :, :5], states(3, 5, 0)[0][ROWS])
    assert cache.get_mask_sizes(1, 0) == (7, 0)  # keys and values from position 0 on


def test_layers_of_a_hybrid_keep_their_own():
    config = Lfm2Config(**SIZES, hidden_size=8, layer_types=["conv", "full_attention", "conv"])
    stock, cache = DynamicCache(config=config), kv_cache.new_cache(config)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [type(stock.layers[0]), BufferedLayer, type(stock.layers[2])]
    assert not issubclass(kinds[0], BufferedLayer)
    conv = torch.randn(3, 8, 3)
    for each in (stock, cache):
        each.update(*states(3, 5, 1), 1)
        each.update_conv_state(conv.clone(), 0)
        each.update_conv_state(conv.clone() + 1, 2)
    kv_cache.spread(cache, ROWS, 2)
    kv_cache.keep(cache, torch.tensor([1, 4]))
    stock.reorder_cache(ROWS[[1, 4]])
    kept = torch.stack([conv[0], conv[2]])
    for each in (stock, cache):
        assert torch.equal(each.layers[0].conv_states[0], kept)
        assert torch.equal(each.layers[2].conv_states[0], kept + 1)
    assert torch.equal(cache.layers[1].keys, stock.layers[1].keys)
