"""The host waits for the GPU nowhere in a step, but where a plain Trainer does, and where the guide for GPUs says so.

From the third step on, torch reports each operation that lets the host wait. Where it was called is compared with the
table "Where the host waits" of `docs/guides/gpu.md`, which names files and functions. On the CPU, where nothing waits,
only the report itself is tested.
"""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from torch import Tensor

from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import on_devices, train_on
from tests.harness.models import Batch
from tests.harness.staged_groups import staged_groups
from tests.harness.training import Layout

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_hanayo/"
REPORT = "called a synchronizing CUDA operation"
FIRST, LAST = 2, 4


class Logged(models.MLP):
    """Logs on all occasions, as users do."""

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        self.log("largest", batch["x"].max(), on_step=True, on_epoch=True)
        return loss


class Waits(Callback):
    """Where the host waited: in which functions, the innermost first, of the package and above it."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.places: list[tuple[str, ...]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.on_gpu and FIRST <= batch_idx <= LAST:
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Inside it, reports are noted with their places."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._show
            yield

    def _show(self, message: Any, *_: Any, **__: Any) -> None:
        if REPORT in str(message):
            frames = [f for f in traceback.extract_stack() if "warnings.py" not in f.filename][:-1]
            above = [f for f in frames if PACKAGE in f.filename] or frames
            self.places.append(tuple(f"{_short(f.filename)}:{f.name}" for f in (frames[-1], *reversed(above))))


def _short(path: str) -> str:
    """The path in the package, or in the library."""
    for folder in (f"/{PACKAGE}", "site-packages/", f"{ROOT}/"):
        if folder in path:
            return path.rpartition(folder)[2]
    return path


def places(device: str, layout: Layout | None, options: dict[str, Any]) -> list[tuple[str, ...]]:
    """Where the host waited in steps 3 to 5, on one rank; without a layout in those of a plain Trainer."""
    waits = Waits(device)
    several = layout is not None and layout.world_size > 1
    with waits.reported(), staged_groups(device) if several else nullcontext():
        train_on(device, layout, Logged, models.vectors((8,) * 6), callbacks=[waits], **options)
    return waits.places


def documented() -> str:
    """The guide's section."""
    page = (ROOT / "docs/guides/gpu.md").read_text(encoding="utf-8")
    return page.partition("## Where the host waits")[2].partition("\n## ")[0]


CASES: list[tuple[Layout, dict[str, Any]]] = [
    (Layout(waves=2), {"precision": "bf16-mixed"}),
    (Layout(waves=2), {"precision": "bf16-mixed", "gradient_clip_val": 1.0}),
    (Layout(waves=2, schedule="hanayo-zb"), {}),
    (Layout(2, 2, 1), {}),
    (Layout(cube=(1, 2, 1)), {"gradient_clip_val": 1.0}),
]


@pytest.mark.parametrize(("device", "layout", "options"), on_devices(CASES, cpu=[CASES[1]]), ids=str)
def test_the_host_waits_only_where_the_guide_says_so(
    launch: Launch, device: str, layout: Layout, options: dict[str, Any]
) -> None:
    (plain,) = launch(device, 1, places, None, options)
    ranks = launch(device, layout.world_size, places, layout, options)
    usual, section = {place[0] for place in plain}, documented()
    found = {place for rank in ranks for place in rank if place[0] not in usual}
    unknown = sorted(place for place in found if not any(f"`{function}`" in section for function in place))
    launch.say(device, f"{layout} {options}: {len(usual)} places of a plain Trainer, {len(found)} more")
    assert not unknown, unknown


def test_a_report_is_noted_with_its_place() -> None:
    waits = Waits("cpu")
    with waits.reported():
        warnings.warn(REPORT, stacklevel=1)
        warnings.warn("another", stacklevel=1)
    (place,) = waits.places
    assert place[0] == "tests/gpu/test_syncs.py:test_a_report_is_noted_with_its_place"
