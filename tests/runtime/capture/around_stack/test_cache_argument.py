"""Blocks on other ranks get a cache as it is before the stack, if it holds something; layers are gone afterwards.

cache   [k0, v0] [k1, v1]        block 1 gets [(k0, v0), (k1, v1)], and the cache is [(k0, v0), x], as block 0 ran here
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.block_tracer import CacheArgument

PAIRS = [(torch.full((1, 1, 2, 3), float(i)), torch.full((1, 1, 2, 3), 10.0 * i)) for i in range(2)]
BLOCK = nn.Identity()


def new_keys() -> Tensor:
    return torch.zeros(1, 1, 1, 3)


def test_a_block_elsewhere_gets_all_layers_as_they_were_and_others_stay() -> None:
    cache = DynamicCache(PAIRS)
    argument = CacheArgument(cache, 0)
    cache.update(new_keys(), new_keys(), 0)  # block 0 runs here
    found = argument.sent_to(BLOCK)
    assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(found.layers, PAIRS, strict=True))
    assert cache.update(new_keys(), new_keys(), 0)[0].shape == (1, 1, 4, 3)


EMPTY = [
    DynamicCache(),
    DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=8)),
    EncoderDecoderCache(DynamicCache(), DynamicCache()),
]


@pytest.mark.parametrize("cache", EMPTY, ids=["plain", "windows", "of two"])
def test_nothing_is_left_of_a_cache_that_was_empty(cache: Any) -> None:
    assert CacheArgument(cache, 0).sent_to(BLOCK) is None


def test_a_cache_in_another_one() -> None:
    found = CacheArgument(EncoderDecoderCache(DynamicCache(), DynamicCache(PAIRS)), 0).sent_to(BLOCK)
    assert torch.equal(found.cross_attention_cache.layers[1].keys, PAIRS[1][0])


@pytest.mark.parametrize("cache", [DynamicCache(), DynamicCache(PAIRS)])
def test_a_second_forward_with_the_cache_is_refused(cache: DynamicCache) -> None:
    argument = CacheArgument(cache, 0)
    argument.check(0)
    argument.sent_to(BLOCK)
    with pytest.raises(UnsupportedError, match="cache again.*A cache lives inside one forward: .*use_cache=False"):
        argument.check(1)
    with pytest.raises(UnsupportedError, match=r"uses a value that isn't here .*: layer 0 of a key/value cache"):
        cache.update(new_keys(), new_keys(), 0)


def test_the_step_may_look_at_layers_of_blocks_that_it_has_not_called() -> None:
    cache = DynamicCache(config=MistralConfig(num_hidden_layers=3))
    argument, block = CacheArgument(cache, 0), nn.Sequential(nn.Identity())
    block[0].layer_idx = 1
    argument.sent_to(block)
    assert not cache.layers[2].is_initialized
    with pytest.raises(UnsupportedError, match="layer 1 of a key/value cache"):
        _ = cache.layers[1].is_initialized


def test_a_block_that_reads_keys_of_others_from_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.cache_utils.KVSharingDict", raising=False)  # as in transformers 5.4
    block = nn.Module()
    block.attention = nn.Module()
    block.attention.is_kv_shared_layer = True
    with pytest.raises(UnsupportedError, match="keys and values of other blocks .*newer transformers"):
        CacheArgument(DynamicCache(), 0).sent_to(block)
