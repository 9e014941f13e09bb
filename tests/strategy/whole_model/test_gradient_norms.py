"""Norms and clipping use the whole model's gradients, bit for bit as torch computes them in one process.

parameters   p0  p1  p2  p3  p4         p4 has no gradient anywhere
rank 0       x       x                  x: has its gradient
rank 1           x       x
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_hanayo.strategy import norms as norm_functions
from lightning_hanayo.strategy.norms import GradientNorms
from tests.harness.pool import Pool

SHAPES = [(40, 30), (7,), (), (3, 5, 2), (4,)]


def parameters(dtype: torch.dtype, poison: float | None = None) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(3)
    found = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in found[:4]:
        parameter.grad = torch.randn(parameter.shape, generator=random).to(dtype)
    if poison is not None:
        found[1].grad[3] = poison
    return found


def clip(dtype: torch.dtype, poison: float | None, max_norm: float, norm_type: float) -> list[torch.Tensor | None]:
    """The norm and the clipped gradients, as far as this rank has them."""
    dist.init_process_group("gloo")
    found = parameters(dtype, poison)
    if dist.get_world_size() == 1:
        total = clip_grad_norm_(found, max_norm, norm_type)
    else:
        for index, parameter in enumerate(found):
            if index % 2 != dist.get_rank():
                found[index] = nn.Parameter(parameter.detach().to("meta"))
        norms = GradientNorms(found, (dist.group.WORLD, dist.group.WORLD), device=torch.device("cpu"))
        norm_functions.PATCHES.start(norms)
        try:
            total = clip_grad_norm_(iter(found), max_norm, norm_type)
        finally:
            norm_functions.PATCHES.stop(norms)
    return [total, *(parameter.grad for parameter in found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("poison", "max_norm"), [(None, 0.1), (None, 1e6), (float("nan"), 0.1), (float("inf"), 0.1)])
def test_bit_equal_to_torch(pool: Pool, dtype: torch.dtype, poison: float | None, max_norm: float) -> None:
    (alone,) = pool.run(1, clip, dtype, poison, max_norm, 2.0)
    ranks = pool.run(2, clip, dtype, poison, max_norm, 2.0)
    assert [torch.equal(ours[0].nan_to_num(7), alone[0].nan_to_num(7)) for ours in ranks] == [True, True]
    for index, expected in enumerate(alone[1:]):
        ours = ranks[index % 2][1 + index]
        assert ranks[1 - index % 2][1 + index] is None
        assert ours is None if expected is None else torch.equal(ours.nan_to_num(7), expected.nan_to_num(7)), index


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 3.0, -1.5, float("inf"), -float("inf")])
def test_other_norms(pool: Pool, norm_type: float) -> None:
    (alone,) = pool.run(1, clip, torch.float64, None, 0.1, norm_type)
    for ours in pool.run(2, clip, torch.float64, None, 0.1, norm_type):
        assert torch.equal(ours[0], alone[0])
