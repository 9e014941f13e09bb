"""A receive that waits on the device never blocks a rank for good, also if the rank's host waits for its device.

A host waits for its device where the allocator is short of memory, where a kernel is loaded, and where user code asks
for it. If a receive was posted before an action on which the sender depends, neither rank gets on. Here each block's
forward waits for all that its rank has posted.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.schedule import build
from tests.gpu.conftest import Launch
from tests.harness.device_loopback import DeviceHub
from tests.harness.devices import on_devices
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


@pytest.mark.parametrize(("device", "name", "sizes"), on_devices(SCHEDULES, cpu=[SCHEDULES[0], SCHEDULES[3]]), ids=str)
def test_a_host_that_waits_for_its_device_gets_on(launch: Launch, device: str, name: str, sizes: Any) -> None:
    (losses,) = launch(device, 1, losses_of_steps, name, sizes, timeout=30.0)
    launch.say(device, f"{name} {sizes}: got on, losses {losses}")
    assert losses[0] == losses[1] == losses[2]
