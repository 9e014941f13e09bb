"""NCCL in a world of one: it starts with each set of options, trains, is aborted after a failure, and starts again.

Several ranks on one GPU: NCCL refuses them as duplicates, by a hash of the host and the bus of the GPU. NCCL_HOSTID
replaces the hash, so that each rank may be taken for a host, and talk to the others over sockets. NCCL doesn't promise
that; so it is tried, and the result printed.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import Tensor

from lightning_hanayo.strategy.groups import CHANNEL, CUBE, DATA, backend_for, group_factory
from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import mean_gap, on_devices, train_on, trainer_on
from tests.harness.models import Batch, build
from tests.harness.pool import RunFailed
from tests.harness.training import Layout, Outcome, make_loader, merge

GPT = partial(models.gpt, heads=4)
BATCHES = models.windows((8, 8, 8))
SHARED = [
    Layout(2, 1, 1, step="auto"),
    Layout(2, 2, 1, "hanayo-zb"),
    Layout(1, 1, 2),
    Layout(cube=(1, 2, 1)),
    Layout(2, 1, 1, cube=(1, 2, 1), step="auto"),
    Layout(4, 1, 1, "zbv"),
    Layout(2, 1, 2, "hanayo-zb"),
    Layout(cube=(1, 2, 2)),
    Layout(cube=(2, 1, 2), outside="replicate"),
    Layout(cube=(1, 2, 2), pairs=True),
    Layout(2, 1, 1, cube=(1, 2, 1), pairs=True),
]
LIMIT_S = 10.0
"""from a failure until the run has ended, and the process has left the group"""


def be_a_host() -> None:
    """Let NCCL take this rank for a host of its own. It reads this when a process first uses it: so all call it."""
    os.environ |= {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}


class Failing(models.MLP):
    """Its second step fails, while kernels are under way."""

    failed_at = 0.0

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        if self.global_step:
            self.failed_at = time.monotonic()
            raise RuntimeError("the planned fault")
        return loss


class Backends(Callback):
    """The backends of the process group."""

    def on_train_start(self, *_: Any) -> None:
        self.names = str(dist.get_backend_config())


def failed_run_and_the_next(device: str) -> tuple[str, str, float, list[float]]:
    """The backends; a run's message, and the seconds from its failure to its end; the losses of a run after it."""
    be_a_host()
    module, backends, message = build(Failing), Backends(), ""
    try:
        trainer = trainer_on(device, Layout(waves=2), max_steps=3, callbacks=[backends])
        trainer.fit(module, make_loader(models.vectors((8, 8, 8))))
    except RuntimeError as error:
        message = str(error)
    seconds = time.monotonic() - module.failed_at  # type: ignore[operator]
    return backends.names, message, seconds, train_on(device, Layout(waves=2), models.MLP, models.vectors((8,))).losses


@pytest.mark.parametrize("device", on_devices([()], cpu=[()]))
def test_a_failed_run_ends_in_time_and_another_may_follow(launch: Launch, device: str) -> None:
    ((backends, message, seconds, losses),) = launch(device, 1, failed_run_and_the_next)
    launch.say(device, f"{backends}: ended {seconds:.1f} s after a failure; the next run's losses: {losses}")
    assert "the planned fault" in message and len(losses) == 1
    if device == "cuda":
        assert "cuda:nccl" in backends
        assert seconds <= LIMIT_S


def seconds_of_groups(device: str) -> dict[str, float]:
    """The seconds that each kind of group takes to be made and used, and all of them to be aborted."""
    be_a_host()
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        seconds[what] = time.monotonic() - start

    own = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with timed("start"):
        options = {"device_id": own} if device == "cuda" else {}
        dist.init_process_group(backend_for(own), **options)
        factory = group_factory(own, timedelta(seconds=30))
    for settings in (CHANNEL, CUBE, DATA):
        with timed(settings.name):
            value = torch.ones(1 << 20, device=own)
            factory._new_tensors(((0,),), settings).allreduce([value]).wait()
            assert value.sum().item() == value.numel()
    with timed("abort"):
        factory.abort()
    return seconds


@pytest.mark.parametrize("device", on_devices([()], cpu=[()]))
def test_groups_of_each_kind_are_made_used_and_aborted_in_time(launch: Launch, device: str) -> None:
    (seconds,) = launch(device, 1, seconds_of_groups, timeout=45.0)
    launch.say(device, "groups: " + ", ".join(f"{what} {value:.2f} s" for what, value in seconds.items()))
    if device == "cuda":
        assert seconds["abort"] <= LIMIT_S


def train_as_hosts(device: str, layout: Layout | None) -> Outcome:
    """Train on one rank of several that share a GPU."""
    be_a_host()
    return train_on(device, layout, GPT, BATCHES)


@pytest.mark.parametrize(("device", "layout"), on_devices(SHARED, cpu=SHARED[:1]), ids=str)
def test_ranks_share_a_gpu_if_nccl_lets_them(launch: Launch, device: str, layout: Layout) -> None:
    (plain,) = launch(device, 1, train_as_hosts, None)
    try:
        outcomes = launch(device, layout.world_size, train_as_hosts, layout, timeout=45.0)
    except RunFailed as error:
        if "Duplicate GPU" not in error.first.message:
            raise
        why = f"{error.first.kind}: {error.first.message}".strip().splitlines()[-1]
        pytest.skip(f"NCCL runs no two ranks on one GPU here: {why}")
    gap = mean_gap(merge(outcomes, layout), plain)
    launch.say(device, f"{layout} over NCCL, all ranks on one GPU: mean difference of a weight {gap:g}")
    assert gap <= 1e-4
