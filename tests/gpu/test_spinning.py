"""A receive that waits on the device never blocks a rank for good, also if the rank's host waits for its device.

A host waits for its device where the allocator is short of memory, where a kernel is loaded, and where user code asks
for it. If a receive was posted before an action on which the sender depends, neither rank gets on.

    threads      ranks in one process: each block's forward waits for all that its rank has posted
    processes    on one GPU: each block's forward waits for the device; and steps with so little memory that the
                 allocator has to free blocks, for which it waits
"""

from typing import Any

import pytest
import torch
from lightning import Callback
from torch import Tensor, nn

from lightning_hanayo.schedule import build
from tests.gpu.conftest import Launch
from tests.gpu.test_traces import Wide
from tests.harness import models
from tests.harness.device_loopback import DeviceHub
from tests.harness.devices import mean_gap, on_devices, train_on, trainer_on
from tests.harness.pool import RunFailed
from tests.harness.staged_groups import staged_groups, synchronize_device
from tests.harness.training import Layout, Outcome, make_loader, merge
from tests.runtime.loopback_pipeline import LoopbackPipeline
from tests.runtime.test_engine import Block, Model

B = 4
SCHEDULES: list[tuple[str, dict[str, int]]] = [
    ("hanayo", {"num_ranks": 2, "num_waves": 2}),
    ("hanayo", {"num_ranks": 2}),
    ("hanayo", {"num_ranks": 4}),
    ("hanayo-zb", {"num_ranks": 2, "num_waves": 2}),
    ("interleaved", {"num_ranks": 2, "num_stages_per_rank": 2}),
    ("zbv", {"num_ranks": 2}),
]


class Synchronizing(Block):
    def __init__(self, hub: DeviceHub) -> None:
        super().__init__(8)
        self.hub = hub

    def forward(self, x: Tensor, scale: Tensor | None = None, bias: float = 0.0) -> Tensor:
        self.hub.synchronize_rank()
        return super().forward(x, scale, bias)


def losses_of_steps(device: str, name: str, sizes: dict[str, int]) -> list[float]:
    """The losses of three steps."""
    torch.manual_seed(0)
    schedule = build(name, num_microbatches=B, **sizes)
    model: Any = Model(8)
    hub = DeviceHub(schedule.num_ranks, device, timeout=15.0)
    model.blocks = nn.ModuleList(Synchronizing(hub) for _ in range(8))
    model.to(device)
    running = LoopbackPipeline(model.blocks, schedule, hub)
    tokens = torch.randint(0, 11, (2 * B, 5), device=device).split(2)
    steps = [running.run(lambda m: model.step(tokens[m]), [1 / B] * B) for _ in range(3)]
    if device == "cuda":
        torch.cuda.synchronize()
    running.close()
    hub.close()
    return [float(sum(losses)) for losses in steps]


@pytest.mark.parametrize(("device", "name", "sizes"), on_devices(SCHEDULES, cpu=[SCHEDULES[0]]), ids=str)
def test_a_host_that_waits_for_its_device_gets_on(launch: Launch, device: str, name: str, sizes: Any) -> None:
    (losses,) = launch(device, 1, losses_of_steps, name, sizes, timeout=45.0)
    launch.say(device, f"{name} {sizes}: got on, losses {losses}")
    assert losses[0] == losses[1] == losses[2]


class Waiting(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        synchronize_device()
        return super().forward(x)


class WaitingMLP(models.MLP):
    """Waits for the device in each block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = Waiting


def train_waiting(device: str, layout: Layout) -> Outcome:
    """Train on one rank of several processes that share a device."""
    with staged_groups(device):
        return train_on(device, layout, WaitingMLP, models.vectors((8, 8, 8)))


LAYOUTS = [Layout(2, 1, 1), Layout(2, 2, 1), Layout(2, 2, 1, "hanayo-zb"), Layout(4, 1, 1)]


@pytest.mark.parametrize(("device", "layout"), on_devices(LAYOUTS, cpu=[LAYOUTS[1]]), ids=str)
def test_processes_that_wait_for_their_device_get_on(launch: Launch, device: str, layout: Layout) -> None:
    (plain,) = launch(device, 1, train_on, None, models.MLP, models.vectors((8, 8, 8)))
    gap = mean_gap(merge(launch(device, layout.world_size, train_waiting, layout), layout), plain)
    launch.say(device, f"{layout}, waiting in each block: mean difference of a weight {gap:g}")
    assert gap <= 1e-4


class LittleMemory(Callback):
    """From the third step on, lets the process have little more memory than the largest step so far has needed."""

    SHARE = 1.3
    """of what was allocated at the peak; blocks have sizes of their own, so that some is always lost"""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.retries = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.on_gpu:
            return
        if batch_idx == 1:
            limit = self.SHARE * torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        self.retries = torch.cuda.memory_stats()["num_alloc_retries"]


def retries(device: str, layout: Layout, width: int) -> int:
    """How often the allocator had to free blocks, on one rank. Lengths change, so that blocks don't fit."""
    little = LittleMemory(device)
    lengths = [tokens * width for tokens in (8, 8, 6, 4, 8, 6, 8, 4)]
    with staged_groups(device):
        trainer = trainer_on(device, layout, max_steps=len(lengths), callbacks=[little])
        trainer.fit(Wide(width), make_loader([torch.randn(length, width) for length in lengths]))
    return little.retries


@pytest.mark.parametrize(
    ("device", "layout", "width"), on_devices([(LAYOUTS[1], 1024)], cpu=[(LAYOUTS[1], 8)]), ids=str
)
def test_processes_short_of_memory_get_on(launch: Launch, device: str, layout: Layout, width: int) -> None:
    try:
        numbers = launch(device, layout.world_size, retries, layout, width)
    except RunFailed as error:
        if error.first.kind != "OutOfMemoryError":
            raise
        pytest.skip(f"{LittleMemory.SHARE} times what the largest step needed is too little on this machine")
    launch.say(device, f"{layout}: the allocator had to free blocks {numbers} times")
