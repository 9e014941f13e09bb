"""Gradients are summed over data ranks, also if one of them has none.

            p0     p1     p2     frozen
rank 0      1      2      .      .
rank 1      10     .      .      .
sum         11     2      .      .        .: no gradient
"""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hanayo.pipeline_parallel.grad_sync import LARGE, GradientAllReduce, sparse_weights
from tests.harness.pool import Pool

GRADIENTS = [[1.0, 2.0, None, None], [10.0, None, None, None]]


def reduce(transposed: bool, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> list[float | None]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    parameters = [nn.Parameter(w.t() if transposed else w) for w in weights]
    parameters[3].requires_grad_(False)
    for parameter, value in zip(parameters, GRADIENTS[dist.get_rank()], strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    reduction = GradientAllReduce({0: parameters[:1], 1: parameters[1:]}, group)
    for stage in (1, 0):
        reduction.start(stage)
    reduction.finish()
    return [None if p.grad is None else p.grad.unique().item() for p in parameters]


SMALL = [(2, 3)] * 4
MIXED = [(2, 3), (256, 512), (512, 256), (256, 512)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shapes"), [(torch.float64, SMALL), (torch.bfloat16, SMALL), (torch.bfloat16, MIXED)]
)
def test_sums(pool: Pool, transposed: bool, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> None:
    assert pool.run(2, reduce, transposed, dtype, shapes) == [[11.0, 2.0, None, None]] * 2


def in_one_memory() -> list[object]:
    """Autograd gives both parameters of `x + p.view(...) + q.view(...)` views of one gradient."""
    dist.init_process_group("gloo")
    p, q = (nn.Parameter(torch.zeros(6)) for _ in range(2))
    (torch.ones(2, 3) + p.view(2, 3) + q.view(2, 3)).square().sum().backward()
    shared = p.grad.data_ptr() == q.grad.data_ptr()
    reduction = GradientAllReduce({0: [p, q]}, dist.group.WORLD)
    reduction.start(0)
    reduction.finish()
    return [shared, p.grad.unique().tolist(), q.grad.unique().tolist()]


def test_gradients_that_share_memory_are_summed_once_each(pool: Pool) -> None:
    assert pool.run(2, in_one_memory) == [[True, [4.0], [4.0]]] * 2


def laid_out() -> list[object]:
    """Rank 0's gradient has its parameter's strides, rank 1's has not."""
    dist.init_process_group("gloo")
    parameter = nn.Parameter(torch.zeros(2, LARGE // 16, dtype=torch.float64))
    rows = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
    gradient = rows.clone() if dist.get_rank() == 0 else rows.t().contiguous().t()
    parameter.grad = gradient
    reduction = GradientAllReduce({0: [parameter]}, dist.group.WORLD)
    reduction.start(0)
    reduction.finish()
    return [torch.equal(parameter.grad, 2 * rows), parameter.grad.data_ptr() == gradient.data_ptr()]


def test_large_gradients_are_reduced_in_place_if_their_strides_agree(pool: Pool) -> None:
    assert pool.run(2, laid_out) == [[True, True], [True, False]]


def mixed() -> list[str]:
    dist.init_process_group("gloo")
    parameters = [nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.float64, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    reduction = GradientAllReduce({0: parameters}, dist.group.WORLD)
    reduction.start(0)
    reduction.finish()
    return [f"{p.grad.dtype} {p.grad.tolist()}" for p in parameters]


def test_one_bucket_per_dtype(pool: Pool) -> None:
    expected = [f"torch.{d} [2.0, 2.0]" for d in ("float32", "float64", "float32")]
    assert pool.run(2, mixed) == [expected] * 2


def again_and_again() -> list[int]:
    """The number of tensors after 20 steps, and after 200; one parameter has no gradient on any rank."""
    dist.init_process_group("gloo")
    parameters = [nn.Parameter(torch.zeros(numbers)) for numbers in (4, LARGE // 4, 3)]
    reduction = GradientAllReduce({0: parameters}, dist.group.WORLD)
    counts = []
    for step in range(200):
        for parameter in parameters[:2]:
            parameter.grad = torch.ones_like(parameter)
        reduction.start(0)
        reduction.finish()
        if step in (19, 199):
            gc.collect()
            counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return counts


def test_nothing_grows(pool: Pool) -> None:
    for early, late in pool.run(2, again_and_again):
        assert late < early + 10, "gloo's threads let go of the last ones a little later; one per step would be 180"


def test_one_data_rank_sums_nothing() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    reduction = GradientAllReduce({0: [parameter]}, None)
    reduction.start(0)
    reduction.finish()
    assert parameter.grad.item() == 1.0


def sparse() -> list[object]:
    """Rows 0 and 1 on rank 0, row 1 on rank 1; of a second table, only rank 1 uses a row; of a third, none does."""
    dist.init_process_group("gloo")
    tables = [nn.Embedding(3, 2, sparse=True) for _ in range(3)]
    rows = [[[0, 1], [], []], [[1], [2], []]][dist.get_rank()]
    for table, used in zip(tables, rows, strict=True):
        if used:
            table(torch.tensor(used)).sum().backward()
    weights = sparse_weights(nn.ModuleList(tables))
    reduction = GradientAllReduce({0: [table.weight for table in tables]}, dist.group.WORLD, weights.values())
    reduction.start(0)
    reduction.finish()
    gradients = [table.weight.grad for table in tables]
    return [list(weights), [None if g is None else (g.is_sparse, g.to_dense()[:, 0].tolist()) for g in gradients]]


def test_sparse_gradients_are_summed_by_rows(pool: Pool) -> None:
    expected = [["0", "1", "2"], [(True, [1.0, 2.0, 0.0]), (True, [0.0, 0.0, 1.0]), None]]
    assert pool.run(2, sparse) == [expected] * 2
