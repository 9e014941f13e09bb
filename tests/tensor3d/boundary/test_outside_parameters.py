"""Parameters outside 3-D layers: what they hold in memory before, during and after a batch, and how many collectives.

                    whole values    whole gradients    copies of one bucket
before a batch           1                                      1
after it                                  1                     1
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hanayo.tensor_parallel import outside_parameters
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters
from tests.runtime.test_memory import Live

WIDTH = 64
LARGE, SMALL = 1000 * WIDTH * 4, 40 * WIDTH * 4
SHARDS = (4 * LARGE + SMALL) // 4
BUCKET = 2**15


class Peak(Live):
    """The most bytes that ever existed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(self.most, self.num_bytes)
        return result


@pytest.fixture
def outside() -> Iterator[OutsideParameters]:
    """Four large parameters, and forty small ones that share buckets, on one rank of a mesh of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    parameters = [nn.Parameter(torch.randn(1000, WIDTH)) for _ in range(4)]
    parameters += [nn.Parameter(torch.randn(WIDTH)) for _ in range(40)]
    made = OutsideParameters(Mesh.create((1, 2, 2)))
    made.shard(parameters)
    with patch.object(outside_parameters, "BUCKET_BYTES", BUCKET):
        yield made


def held(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def test_before_a_batch_there_is_no_second_copy_of_whole_values(outside: OutsideParameters) -> None:
    with Peak() as live:
        outside.all_gather()
    assert live.num_bytes == SHARDS + 4 * LARGE + SMALL
    assert live.most <= live.num_bytes + 2 * SMALL


def test_after_a_batch_whole_gradients_go_one_by_one(outside: OutsideParameters) -> None:
    with Peak() as live:
        outside.all_gather()
        for parameter in outside.parameters:
            parameter.grad = torch.randn_like(parameter)
        before, live.most = live.num_bytes, 0
        outside.reduce_scatter()
    assert before == SHARDS + 2 * (4 * LARGE + SMALL)  # whole values, whole gradients
    assert live.most <= before + 1024  # a flag for each parameter
    assert live.num_bytes == 2 * SHARDS  # of values and of gradients


def test_gradients_whose_rows_do_not_divide_are_copied_one_at_a_time(outside: OutsideParameters) -> None:
    parameters = [nn.Parameter(torch.randn(rows, WIDTH)) for rows in (1003, 1001, 1002, 999)]
    odd, seen = OutsideParameters(outside._mesh), []
    scatter = type(odd._axis).reduce_scatter_each

    def watched(axis: Any, parts: list[Tensor]) -> Any:
        seen.append(live.num_bytes)
        return scatter(axis, parts)

    odd.shard(parameters)
    with Peak() as live, patch.object(type(odd._axis), "reduce_scatter_each", watched):
        odd.all_gather()
        for parameter in odd.parameters:
            parameter.grad = torch.randn_like(parameter)
        odd.reduce_scatter()
    shards, padded = held(parameters), 1004 * WIDTH * 4
    at_first = 2 * shards + 4 * padded  # this rank's values; whole gradients, of which the first one is padded
    assert seen[0] <= at_first
    assert [before - after for before, after in pairwise(seen)] == pytest.approx([padded * 3 / 4] * 3, rel=0.01)


def test_small_parameters_share_collectives_and_large_ones_have_their_own(outside: OutsideParameters) -> None:
    seen: list[int] = []
    gather = type(outside._axis).gather_into

    def counted(axis: Any, wholes: list[Tensor], tensors: list[Tensor]) -> Any:
        seen.append(sum(one.numel() for one in tensors))
        return gather(axis, wholes, tensors)

    with patch.object(type(outside._axis), "gather_into", counted):
        outside.all_gather()
    assert seen == [1000 * WIDTH // 4] * 4 + [40 * WIDTH // 4]
