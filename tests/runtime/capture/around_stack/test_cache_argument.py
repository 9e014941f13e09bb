"""A block on another rank gets its own layer of a cache, if that holds something; nobody can use the layer afterwards.

cache   [k0, v0] [k1, v1]        block 1 gets [None, (k1, v1)], and the cache is [(k0, v0), x]
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.block_tracer import cache_for

PAIRS = [(torch.full((1, 1, 2, 3), float(i)), torch.full((1, 1, 2, 3), 10.0 * i)) for i in range(2)]


class Block(nn.Module):
    def __init__(self, index: int | None) -> None:
        super().__init__()
        self.attention = nn.Identity()
        if index is not None:
            self.attention.layer_idx = index


def new_keys() -> Tensor:
    return torch.zeros(1, 1, 1, 3)


def test_the_block_gets_its_own_layer() -> None:
    found = cache_for(Block(1), DynamicCache(PAIRS))
    keys, values = found.update(new_keys(), new_keys(), 1)
    assert torch.equal(keys[..., :2, :], PAIRS[1][0]) and torch.equal(values[..., :2, :], PAIRS[1][1])
    assert found.layers[0] is None


def test_the_other_layers_stay_as_they_are() -> None:
    cache = DynamicCache(PAIRS)
    cache_for(Block(1), cache)
    assert cache.update(new_keys(), new_keys(), 0)[0].shape == (1, 1, 3, 3)


def test_a_block_without_an_index_gets_all_layers() -> None:
    found = cache_for(Block(None), DynamicCache(PAIRS))
    assert all(torch.equal(layer.keys, keys) for layer, (keys, _) in zip(found.layers, PAIRS, strict=True))


@pytest.mark.parametrize("cache", [DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())])
def test_nothing_is_left_of_an_empty_cache(cache: Any) -> None:
    assert cache_for(Block(0), cache) is None


def test_a_cache_in_another_one() -> None:
    found = cache_for(Block(1), EncoderDecoderCache(DynamicCache(), DynamicCache(PAIRS)))
    assert torch.equal(found.cross_attention_cache.layers[1].keys, PAIRS[1][0])


@pytest.mark.parametrize("cache", [DynamicCache(), DynamicCache(PAIRS)])
def test_a_second_forward_with_the_cache_is_refused(cache: DynamicCache) -> None:
    cache_for(Block(1), cache)
    with pytest.raises(
        UnsupportedError,
        match="uses layer 1 of a key/value cache .*A cache lives inside one forward: .*use_cache=False",
    ):
        cache_for(Block(1), cache)
    with pytest.raises(UnsupportedError, match="uses layer 1 of a key/value cache"):
        cache.update(new_keys(), new_keys(), 1)
