"""Measures how long each block takes, on the device that will run it, with one block there at a time.

device   | outside | block 0 |         | block 1 |         | outside |
                              0 -> host           1 -> host             blocks come and go between two marks
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_hanayo.clock import Clock, clock_for
from lightning_hanayo.partition.stack import Stack, modules_outside

_OUTSIDE, _MOVE = "outside the stack", "between host and device"


def measure_block_times(
    model: nn.Module, stack: Stack, forward: Callable[[], object], device: torch.device, clock: Clock | None = None
) -> tuple[list[float], float]:
    """Time each block, and all other code, in `forward`, which runs the whole `model` once with inputs on `device`.

    The model stays where it is. Values of parameters, buffers (BatchNorm counts its calls) and the state of the random
    generators are restored afterwards. `clock` is by default that of the device.

    Returns:
        Seconds of each block's forward, and seconds of all code outside the stack: the minimum of three runs.
        (The backward is assumed to be proportional.)
    """
    clock = clock_for(device) if clock is None else clock
    saved_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gpus = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cuda"),
        _moved(modules_outside(model, stack), device),
    ):
        _, *runs = [_time_run(stack, forward, device, clock) for _ in range(4)]  # the first run is a warm-up
    for buffer, saved in saved_buffers:
        buffer.copy_(saved)
    blocks = [min(run[0][i] for run in runs) for i in range(len(stack))]
    return blocks, max(0.0, min(run[1] for run in runs))


def _time_run(
    stack: Stack, forward: Callable[[], object], device: torch.device, clock: Clock
) -> tuple[list[float], float]:
    """Seconds of each block in one run of `forward`, and seconds of the rest."""
    marks: list[tuple[object, Any]] = []  # whose time begins with a mark
    on_device = ExitStack()

    def before(block: nn.Module, _: object) -> None:
        marks.append((_MOVE, clock.mark()))
        on_device.enter_context(_moved(block.modules(), device))
        marks.append((block, clock.mark()))

    def after(_: nn.Module, __: object, ___: object) -> None:
        marks.append((_MOVE, clock.mark()))
        on_device.close()
        marks.append((_OUTSIDE, clock.mark()))

    hooks = [hook for block in stack.blocks
             for hook in (block.register_forward_pre_hook(before), block.register_forward_hook(after))]  # fmt: skip
    try:
        marks.append((_OUTSIDE, clock.mark()))
        with torch.no_grad(), on_device:
            forward()
        marks.append((_MOVE, clock.mark()))
    finally:
        for hook in hooks:
            hook.remove()
    seconds: dict[object, float] = dict.fromkeys((*stack.blocks, _OUTSIDE, _MOVE), 0.0)
    for (owner, _), (start, end) in zip(marks, pairwise(clock.seconds([mark for _, mark in marks])), strict=False):
        seconds[owner] += end - start
    return [seconds[block] for block in stack.blocks], seconds[_OUTSIDE]


@contextmanager
def _moved(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Have the parameters and buffers of these modules on `device`; afterwards where they were before."""
    own = (one for part in modules for one in (*part._parameters.values(), *part._buffers.values()))
    before = {one: one.data for one in own if one is not None and one.device != device}
    for tensor, data in before.items():
        tensor.data = data.to(device)
    try:
        yield
    finally:
        for tensor, data in before.items():
            tensor.data = data
