"""NCCL in a world of one: it starts with each set of options, trains, is aborted after a failure, and starts again.

Several ranks on one GPU: NCCL refuses them as duplicates, by a hash of the host and the bus of the GPU. NCCL_HOSTID
replaces the hash, so that each rank may be taken for a host, and talk to the others over sockets. NCCL doesn't promise
that; so it is tried, and the result printed.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Callback, LightningModule
from torch import Tensor, nn

from lightning_hanayo.strategy.groups import CHANNEL, CUBE, DATA, backend_for, group_factory
from tests.equivalence.test_between import Residual
from tests.equivalence.test_experts import Mixture, sequences
from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import mean_gap, on_devices, train_on, trainer_on
from tests.harness.models import Batch, build
from tests.harness.pool import RunFailed
from tests.harness.training import Layout, Outcome, make_loader, merge

GPT = partial(models.gpt, heads=4)
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


class Matrices(models.MLP):
    """Muon, which reads whole matrices, and AdamW for the rest."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.blocks.parameters() if p.dim() == 2], lr=1e-3)


class Tower(models.MLP):
    """A second list of blocks, larger than the stack and never called: a dry run in a fork tells which one is it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)).requires_grad_(requires_grad=False)


@dataclass(frozen=True)
class Case:
    """What ranks that share a GPU train."""

    name: str
    layout: Layout
    model: Callable[[], LightningModule] = GPT
    batches: Callable[[], list[Batch]] = partial(models.windows, (8, 8, 8))

    def __str__(self) -> str:
        return f"{self.name}, {self.layout}"


VECTORS = partial(models.vectors, (8, 8, 8))
CASES = [
    *(Case("GPT", layout) for layout in SHARED),
    Case("code between blocks", Layout(2, 2, 1, step="auto"), Residual, VECTORS),
    Case("code between blocks", Layout(2, 1, 1, cube=(1, 2, 1)), Residual, VECTORS),
    Case("a matrix optimizer", Layout(2, 1, 1), Matrices, VECTORS),
    Case("a matrix optimizer", Layout(cube=(1, 2, 1)), Matrices, VECTORS),
    Case("two lists of blocks", Layout(2, 1, 1), Tower, VECTORS),
    Case("experts", Layout(cube=(1, 2, 2), num_microbatches=2, experts="cube"), Mixture, sequences),
    Case("experts", Layout(2, 1, 1, cube=(1, 2, 1), experts="cube"), Mixture, sequences),
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


def train_as_hosts(device: str, case: Case, layout: Layout | None) -> Outcome:
    """Train on one rank of several that share a GPU."""
    be_a_host()
    return train_on(device, layout, case.model, case.batches())


@pytest.mark.parametrize(("device", "case"), on_devices(CASES, cpu=[CASES[0], *CASES[len(SHARED) :: 2]]), ids=str)
def test_ranks_share_a_gpu_if_nccl_lets_them(launch: Launch, device: str, case: Case) -> None:
    (plain,) = launch(device, 1, train_as_hosts, case, None)
    try:
        outcomes = launch(device, case.layout.world_size, train_as_hosts, case, case.layout, timeout=45.0)
    except RunFailed as error:
        if "Duplicate GPU" not in error.first.message:
            raise
        why = f"{error.first.kind}: {error.first.message}".strip().splitlines()[-1]
        pytest.skip(f"NCCL runs no two ranks on one GPU here: {why}")
    gap = mean_gap(merge(outcomes, case.layout), plain)
    launch.say(device, f"{case} over NCCL, all ranks on one GPU: mean difference of a weight {gap:g}")
    assert gap <= 1e-4
