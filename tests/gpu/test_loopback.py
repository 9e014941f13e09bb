"""All pipeline ranks on one GPU, as threads with a stream each: equal to one process, whatever comes late.

Transfers run in streams of their own and pause at random; buffers hold no numbers before they are written and after
they are read; memory that is not yet written holds none either. A receive spins on the device until its data comes. So
a transfer that isn't waited for, or a buffer that is used again too early, gives a wrong gradient in one of the runs.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hanayo.schedule import build
from tests.gpu.conftest import Launch
from tests.harness.device_loopback import DeviceHub, Transfer
from tests.harness.devices import be_deterministic, on_devices
from tests.runtime.loopback_pipeline import LoopbackPipeline
from tests.runtime.test_engine import Model, expected

B = 4
_WAIT = Transfer.wait
SCHEDULES: list[tuple[str, dict[str, int]]] = [
    ("hanayo", {"num_ranks": 2, "num_waves": 2}),
    ("hanayo", {"num_ranks": 4}),
    ("hanayo-zb", {"num_ranks": 2, "num_waves": 2}),
    ("gpipe", {"num_ranks": 2}),
    ("1f1b", {"num_ranks": 4}),
    ("zb-h1", {"num_ranks": 2}),
    ("interleaved", {"num_ranks": 2, "num_stages_per_rank": 4}),
    ("interleaved-zb", {"num_ranks": 2, "num_stages_per_rank": 2}),
    ("zbv", {"num_ranks": 4}),
    ("v-half", {"num_ranks": 2}),
    ("v-min", {"num_ranks": 2}),
]


def wrong_steps(device: str, name: str, sizes: dict[str, int], repetitions: int) -> list[str]:
    """The steps whose losses or gradients differ from those of one process, and by how much."""
    be_deterministic()
    torch.manual_seed(0)
    schedule = build(name, num_microbatches=B, **sizes)
    model: Any = Model(8, width=32).to(device)
    reference = copy.deepcopy(model)
    hub = DeviceHub(schedule.num_ranks, device)
    running, wrong = LoopbackPipeline(model.blocks, schedule, hub), []
    for repetition in range(repetitions):
        batch = [tokens.to(device) for tokens in _tokens(repetition)]
        for one in (model, reference):
            one.zero_grad()
        losses = running.run(lambda m, batch=batch: model.step(batch[m]), [1 / B] * B)
        _wait(device)
        gaps = [(torch.stack(losses) - torch.stack(expected(reference, batch))).abs().max()]
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        gaps += [(ours.grad - theirs.grad).abs().max() for ours, theirs in pairs]
        if not all(gap == 0 for gap in gaps):
            wrong.append(f"step {repetition}: {max(gap.item() for gap in gaps):g}")
    running.close()
    hub.close()
    return wrong


def wrong_steps_unwaited(device: str) -> list[str]:
    """The wrong steps of ranks that don't wait for their transfers."""
    Transfer.wait = lambda self: None  # type: ignore[method-assign]
    try:
        return wrong_steps(device, *SCHEDULES[0], 2)
    finally:
        Transfer.wait = _WAIT  # type: ignore[method-assign]


def _tokens(seed: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (2 * B, 5), generator=torch.Generator().manual_seed(seed)).split(2)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("device", "name", "sizes", "repetitions"),
    on_devices(
        [(*case, 50) for case in SCHEDULES],
        cpu=[(*SCHEDULES[0], 10), (*SCHEDULES[-3], 5)],
    ),
    ids=str,
)
def test_equal_to_one_process(launch: Launch, device: str, name: str, sizes: dict[str, int], repetitions: int) -> None:
    (wrong,) = launch(device, 1, wrong_steps, name, sizes, repetitions)
    launch.say(device, f"{name} {sizes}: {repetitions - len(wrong)} of {repetitions} steps are equal to one process")
    assert not wrong


@pytest.mark.parametrize("device", on_devices([()], cpu=[]))
def test_a_transfer_that_is_not_waited_for_is_found(launch: Launch, device: str) -> None:
    (wrong,) = launch(device, 1, wrong_steps_unwaited)
    launch.say(device, f"without waiting: {'; '.join(wrong)}")
    assert wrong
