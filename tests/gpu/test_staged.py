"""Four processes on one GPU: cubes, pipelines and data ranks train as one process does, with groups that are native.

The groups copy tensors through the host (`tests/harness/staged_groups.py`), and otherwise behave like those over NCCL.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from lightning import Callback, Trainer
from torch import Tensor

from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import mean_gap, on_devices, train_on
from tests.harness.models import Batch
from tests.harness.pool import RunFailed
from tests.harness.staged_groups import staged_groups
from tests.harness.training import Layout, Outcome, merge
from tests.strategy.lightning import test_precision as scaled

BATCHES = {"cpu": models.windows((8, 8)), "cuda": models.windows((8, 8, 8))}
GPT = partial(models.gpt, heads=4)
LAYOUTS = [
    Layout(2, 2, 1),
    Layout(2, 1, 2),
    Layout(cube=(1, 2, 2)),
    Layout(cube=(2, 1, 2), outside="replicate"),
    Layout(2, 1, 1, cube=(1, 2, 1)),
    Layout(4, 1, 1, "zbv"),
    Layout(2, 1, 2, "hanayo-zb"),
    Layout(cube=(1, 2, 2), pairs=True),
    Layout(2, 1, 1, cube=(1, 2, 1), pairs=True),
]


class Devices(Callback):
    """The devices of what is logged."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.types |= {str(value.device.type) for value in trainer.callback_metrics.values()}


def train_staged(device: str, layout: Layout) -> tuple[Outcome, set[str]]:
    """The outcome of one rank, and the devices of what it logs."""
    devices = Devices()
    with staged_groups(device):
        return train_on(device, layout, GPT, BATCHES[device], callbacks=[devices]), devices.types


@pytest.mark.parametrize(("device", "layout"), on_devices(LAYOUTS, cpu=[Layout(2, 1, 2)]), ids=str)
def test_trains_as_one_process_does(launch: Launch, device: str, layout: Layout) -> None:
    (plain,) = launch(device, 1, train_on, None, GPT, BATCHES[device])
    ranks = launch(device, layout.world_size, train_staged, layout)
    gap = mean_gap(merge([outcome for outcome, _ in ranks], layout), plain)
    launch.say(device, f"{layout}: mean difference of a weight {gap:g}")
    assert gap <= 1e-4
    assert set().union(*(types for _, types in ranks)) == {device}


def train_scaled(device: str, layout: Layout | None) -> scaled.Scaled:
    """fp16 with a gradient scaler. The last rank finds an inf in the third batch."""
    with nullcontext() if layout is None else staged_groups(device):
        return scaled.train_scaled(layout, scaled.Descent, 0.1, 1, device)


@pytest.mark.parametrize(
    ("device", "layout"), on_devices([Layout(2, 1, 2), Layout(2, 1, 1, cube=(1, 2, 1))], cpu=[Layout(2)]), ids=str
)
def test_an_infinity_on_one_rank_skips_the_step_on_all(launch: Launch, device: str, layout: Layout) -> None:
    (plain,) = launch(device, 1, train_scaled, None)
    ranks = launch(device, layout.world_size, train_scaled, layout)
    launch.say(device, f"16-mixed, {layout}: loss scales {[f'{scale:g}' for scale in ranks[0][1]]}")
    scaled.assert_same_scales_and_weights(ranks, plain, layout)


class Failing(models.MLP):
    """Its second step fails, while other ranks' devices wait for messages and sums."""

    def loss(self, batch: Batch) -> Tensor:
        if self.global_step:
            raise RuntimeError("the planned fault")
        return super().loss(batch)


def train_failing(device: str, layout: Layout) -> Outcome:
    with staged_groups(device):
        return train_on(device, layout, Failing, models.vectors((8, 8, 8)))


FAILING = [Layout(2, 2, 1), Layout(2, 1, 2), Layout(2, 1, 1, cube=(1, 2, 1))]


@pytest.mark.parametrize(("device", "layout"), on_devices(FAILING, cpu=FAILING[:1]), ids=str)
def test_the_others_end_when_a_rank_fails(launch: Launch, device: str, layout: Layout) -> None:
    with pytest.raises(RunFailed) as caught:
        launch(device, layout.world_size, train_failing, layout)
    kinds = {failure.rank: failure.kind for failure in caught.value.failures}
    launch.say(device, f"{layout}: {kinds}")
    assert caught.value.first.message == "the planned fault"
    assert sorted(kinds) == list(range(layout.world_size)) and "timed out" not in kinds.values(), caught.value
