"""Balances the stages: measures how long each block takes, and cuts the stack into stages of about equal cost."""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition.stack import Stack


def cut(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """The indices of each stage's blocks, for contiguous stages, none empty, with the least maximum cost.

    Args:
        costs: one per block, in any unit (parameters, seconds).
        num_stages: at most the number of blocks.
        first, last: the cost of what the first and the last stage do besides their blocks, in the same unit.

    Raises:
        HanayoError: there are fewer blocks than stages.

    Example:
        >>> cut([1, 1, 1, 1, 1], 2, last=1.0)
        [range(0, 3), range(3, 5)]
    """
    if len(costs) < num_stages:
        raise HanayoError(f"{len(costs)} blocks can't fill {num_stages} stages")
    sums = [0.0, *accumulate(map(float, costs))]
    num_blocks = len(costs)
    best: list[_Cut | None] = [_Cut(), *[None] * num_blocks]  # best[i] cuts the first i blocks; None: impossible
    for stage in range(num_stages):
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        best = [_add_stage(best, sums, stop, extra) for stop in range(num_blocks + 1)]
    found = best[num_blocks]
    assert found is not None
    return [range(start, stop) for start, stop in pairwise((*found.starts, num_blocks))]


class _Cut(NamedTuple):
    """The stages so far. A lower maximum cost is better; of equal ones, the more even cut."""

    max_cost: float = 0.0
    sum_of_squares: float = 0.0
    starts: tuple[int, ...] = ()


def _add_stage(best: Sequence[_Cut | None], sums: Sequence[float], stop: int, extra: float) -> _Cut | None:
    """The best cut of the first `stop` blocks that has one more stage than those in `best`."""
    options = []
    for start, before in enumerate(best[:stop]):
        if before is not None:
            cost = sums[stop] - sums[start] + extra
            squares = before.sum_of_squares + cost * cost
            options.append(_Cut(max(before.max_cost, cost), squares, (*before.starts, start)))
    return min(options, default=None)


def measure_block_times(model: nn.Module, stack: Stack, forward: Callable[[], object]) -> tuple[list[float], float]:
    """Time each block, and all other code, in `forward`, which runs the whole `model` once.

    Buffers (BatchNorm counts its calls) and the state of the random generators are restored afterwards.

    Returns:
        Seconds of each block's forward, and seconds of all code outside the stack: the minimum of three runs.
        (The backward is assumed to be proportional.)
    """
    saved_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        _, *runs = [_time_run(stack, forward) for _ in range(4)]  # the first run is a warm-up
    for buffer, saved in saved_buffers:
        buffer.copy_(saved)
    blocks = [min(run[0][i] for run in runs) for i in range(len(stack))]
    return blocks, max(0.0, min(run[1] for run in runs))


def _time_run(stack: Stack, forward: Callable[[], object]) -> tuple[list[float], float]:
    """Seconds of each block in one run of `forward`, and seconds of the rest."""
    starts: dict[nn.Module, float] = {}
    seconds: dict[nn.Module, float] = dict.fromkeys(stack.blocks, 0.0)

    def before(block: nn.Module, _: object) -> None:
        starts[block] = _clock()

    def after(block: nn.Module, _: object, __: object) -> None:
        seconds[block] += _clock() - starts[block]

    hooks = [hook for block in stack.blocks
             for hook in (block.register_forward_pre_hook(before), block.register_forward_hook(after))]  # fmt: skip
    try:
        start = _clock()
        with torch.no_grad():
            forward()
        total = _clock() - start
    finally:
        for hook in hooks:
            hook.remove()
    return list(seconds.values()), total - sum(seconds.values())


def _clock() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
