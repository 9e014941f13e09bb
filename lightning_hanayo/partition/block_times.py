"""Measures how long each block of a stack takes on an example batch."""

import time
from collections.abc import Callable

import torch
from torch import nn

from lightning_hanayo.partition.stack import Stack


def measure_block_times(
    model: nn.Module, stack: Stack, forward: Callable[[], object], repeats: int = 3
) -> tuple[list[float], float]:
    """Time each block, and all other code, in `forward`, which runs the whole `model` once.

    Buffers (BatchNorm counts its calls) and the state of the random generators are restored afterwards.

    Returns:
        Seconds of each block's forward, and seconds of all code outside the stack: the minimum of `repeats` runs.
        (The backward is assumed to be proportional.)
    """
    saved_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        runs = [_time_run(stack, forward) for _ in range(repeats + 1)][1:]  # the first run is a warm-up
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
