"""A long run: nothing grows from step to step, and no step waits for a device.

step 0 .. 99      agrees, fills buffers and traces
step 100 .. 499   four windows of 100 steps: as many objects, tensors and bytes after a window as before it
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hanayo.schedule import build
from tests.runtime.loopback_pipeline import LoopbackPipeline

SETTLED, WINDOW, WINDOWS = 100, 100, 4
STATM = Path("/proc/self/statm")
WAITING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""methods that copy a value to the host, which waits for all earlier work of its device"""


class Model(nn.Module):
    """Its head is its embedding: a tied weight."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))

    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(x @ self.embedding.weight.T, tokens)


@contextmanager
def steps(schedule: str, microbatches: int, context: Callable[[], Any]) -> Iterator[Callable[[int], object]]:
    """A function that runs the step of that number; lengths change from step to step, as in a bucketed dataset."""
    table = build(schedule, num_ranks=2, num_microbatches=microbatches)
    model = Model(table.num_stages)
    running = LoopbackPipeline(model.blocks, table)

    def run(number: int) -> object:
        for parameter in model.parameters():
            parameter.grad = None
        tokens = torch.ones(microbatches, 2 + number % 3, dtype=torch.long)

        def step(microbatch: int) -> Tensor:
            with context():  # user code has a thread of its own
                return model.step(tokens[microbatch])

        return running.run(step, [1 / microbatches] * microbatches, signature=number % 3, context=context)

    try:
        yield run
    finally:
        running.close()


def held() -> tuple[int, int, int]:
    """Objects, tensors, and the tensors' bytes, each storage once."""
    gc.collect()
    things = gc.get_objects()
    tensors = [thing for thing in things if type(thing) in (Tensor, nn.Parameter)]  # not torch.compile's own
    dense = [tensor for tensor in tensors if not tensor.is_meta and tensor.layout is torch.strided]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}
    return len(things), len(tensors), sum(storages.values())


def resident() -> int:
    """This process's bytes in memory; 0 where that can't be read."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if STATM.exists() else 0


def test_nothing_grows_over_many_steps() -> None:
    """What a step leaves behind shows in every window; what something else in this process loads, in one."""
    with steps("zb-h1", 1, nullcontext) as run:
        for number in range(SETTLED):
            run(number)
        counts, rooms = [held()], [resident()]
        for start in range(SETTLED, SETTLED + WINDOWS * WINDOW, WINDOW):
            for number in range(start, start + WINDOW):
                run(number)
            counts.append(held())
            rooms.append(resident())
    assert len({count[1:] for count in counts}) == 1
    growths = [after[0] - before[0] for before, after in pairwise(counts)]
    assert min(growths) <= 20, f"{growths}: the test's own; a single object per step would be {WINDOW}"
    grown = [after - before for before, after in pairwise(rooms)]
    assert min(grown) < 2**20, f"{grown}: 10 kB per step would be more in each window"


class Waits(AssertionError):
    """A value was copied from a device."""


class NeverWaits(TorchDispatchMode):
    """Raises an error where C++ code copies a value to the host, or a tensor between devices."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero) or (
            kwargs and kwargs.get("device") is not None and any(isinstance(arg, Tensor) for arg in args)
        ):
            raise Waits(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["hanayo", "hanayo-zb"])
def test_no_step_waits_for_a_device(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with steps(schedule, 2, NeverWaits) as run:
        with monkeypatch.context() as patched:
            patched.setattr(NeverWaits, "__torch_dispatch__", lambda _, f, __, a=(), k=None: f(*a, **(k or {})))
            for number in range(3):
                run(number)  # agrees on what messages look like: specs travel as bytes
        for method in WAITING:
            monkeypatch.setattr(Tensor, method, _waits(method))
        for number in range(3):
            run(number)


def _waits(method: str) -> Callable[..., NoReturn]:
    def wait(*_: object, **__: object) -> NoReturn:
        raise Waits(f"Tensor.{method}")

    return wait


@pytest.mark.parametrize("fetch", [Tensor.item, bool, Tensor.nonzero, lambda t: t.to("meta")])
def test_waiting_is_detected(fetch: Callable[[Tensor], object]) -> None:
    with NeverWaits(), pytest.raises(Waits):
        fetch(torch.ones(1))
