"""Data ranks sum, update and gather their rows of parameters of any size."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.tensor_parallel.mesh import MeshAxis
from tests.harness.pool import Pool

SHAPES = [(), (2,), (7,), (512, 300), (513, 300), (1, 400, 300), (300, 512)]


def update(num_ranks: int, scatters: bool) -> list[Tensor]:
    """Subtract summed gradients from parameters, large and small ones, each rank from its rows."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    parameters[-1] = nn.Parameter(parameters[-1].detach().t())  # its memory is in another order
    gradients = [[torch.randn(p.shape, generator=generator).double() for p in parameters] for _ in range(num_ranks)]
    expected = [p.detach() - sum(each) for p, *each in zip(parameters, *gradients, strict=True)]
    stages = {0: parameters[:4], 1: parameters[4:]}
    shards = OptimizerShards(stages, MeshAxis(group, num_ranks, rank), None, scatters=scatters)
    assert [p in shards for p in parameters] == [False, num_ranks == 2, True, True, True, True, False]
    for parameter, gradient in zip(parameters, gradients[rank], strict=True):
        parameter.grad = gradient
    reduction = GradientAllReduce(stages, group, scatter=shards)
    for stage in (1, 0):
        reduction.start(stage)
    reduction.finish()
    shards.put_in(parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter -= parameter.grad
            assert parameter.numel() == math.prod(shards.local_shape(parameter))
    shards.take_out(gathers=True)
    shards.finish(0)
    shards.finish()
    assert all((p.grad is None) == (scatters and p in shards) for p in parameters)
    return [p.detach() - wanted for p, wanted in zip(parameters, expected, strict=True)]


@pytest.mark.parametrize(("num_ranks", "scatters"), [(2, True), (3, True), (3, False)])
def test_rows_of_any_size(pool: Pool, num_ranks: int, scatters: bool) -> None:
    for differences in pool.run(num_ranks, update, num_ranks, scatters):
        assert max(difference.abs().max().item() for difference in differences) < 1e-13
