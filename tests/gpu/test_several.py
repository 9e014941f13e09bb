"""With two or more GPUs: pipelines, waves, cubes and data ranks over NCCL train as one process does; a killed rank.

GPUs    layouts
2       P = 2 (each schedule), data 2, cubes of two ranks
4       P = 4, P = 2 with data 2, P = 2 in a cube of two, cubes of four
8       P = 2 in a cube of four, P = 4 with data 2
"""

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import mean_gap, on_devices, train_on
from tests.harness.models import Batch
from tests.harness.pool import RunFailed
from tests.harness.training import Layout, merge

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "hanayo-zb")
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(1, 1, 2),
    Layout(cube=(1, 2, 1)),
    Layout(cube=(2, 1, 1), outside="replicate"),
    *(Layout(2, 1, 1, schedule) for schedule in SCHEDULES),
    Layout(4, 1, 1),
    Layout(4, 1, 1, "zbv"),
    Layout(2, 1, 2),
    Layout(2, 1, 1, cube=(1, 2, 1)),
    Layout(cube=(1, 2, 2)),
    Layout(2, 1, 1, cube=(1, 2, 2)),
    Layout(4, 1, 2, "hanayo-zb"),
]
BATCHES = models.windows((8, 8, 8))
GPT = partial(models.gpt, heads=4)


def skip_without(num_gpus: int) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs, this machine has {torch.cuda.device_count()}")


@pytest.mark.parametrize(("device", "layout"), on_devices(LAYOUTS, cpu=[Layout(2, 1, 1, cube=(1, 2, 1))]), ids=str)
def test_trains_as_one_process_does(launch: Launch, device: str, layout: Layout) -> None:
    if device == "cuda":
        skip_without(layout.world_size)
    (plain,) = launch(device, 1, train_on, None, GPT, BATCHES)
    outcomes = launch(device, layout.world_size, train_on, layout, GPT, BATCHES)
    gap = mean_gap(merge(outcomes, layout), plain)
    launch.say(device, f"{layout}: mean difference of a weight {gap:g}")
    assert gap <= 1e-4


class Killed(models.MLP):
    """Its second step kills the process, while its peers wait for a message."""

    def loss(self, batch: Batch) -> Tensor:
        if self.global_step:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch)


def train_killed(device: str, layout: Layout) -> Any:
    return train_on(device, layout, Killed, models.vectors((8, 8, 8)))


@pytest.mark.parametrize(("device", "size"), on_devices([2, 4], cpu=[2]))
def test_the_others_end_when_a_rank_is_killed(launch: Launch, device: str, size: int) -> None:
    if device == "cuda":
        skip_without(size)
    with pytest.raises(RunFailed) as caught:
        launch(device, size, train_killed, Layout(size, 1, 1))
    failures = {failure.rank: failure for failure in caught.value.failures}
    launch.say(device, "; ".join(f"rank {rank} {failures[rank].kind}" for rank in sorted(failures)))
    assert sorted(failures) == list(range(size))
    assert failures[0].kind == "died" and "SIGKILL" in failures[0].message
    assert all(failures[rank].kind != "timed out" for rank in failures), caught.value
