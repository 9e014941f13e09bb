"""The user's step finds the main thread's device, stream, autocast and modes, and keeps no memory from step to step."""

import gc
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning import Callback
from torch import Tensor

from lightning_hanayo.pipeline_parallel.capture.threads import ThreadState
from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import on_devices, trainer_on
from tests.harness.models import Batch, build
from tests.harness.training import Layout, make_loader

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")


@dataclass(frozen=True)
class Seen:
    """What code finds where it runs. Only the thread differs between the main thread and a step's."""

    thread: str = field(compare=False)
    state: dict[str, str]
    device: int
    own_stream: bool

    @staticmethod
    def now() -> "Seen":
        on_gpu = torch.cuda.is_initialized()
        return Seen(
            threading.current_thread().name,
            {name: str(value) for name, value in vars(ThreadState.current()).items()},
            torch.cuda.current_device() if on_gpu else -1,
            on_gpu and torch.cuda.current_stream() != torch.cuda.default_stream(),
        )


class Watching(models.MLP):
    """Notes what its step finds, before and after the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def loss(self, batch: Batch) -> Tensor:
        self.seen.append(Seen.now())
        loss = super().loss(batch)
        self.seen.append(Seen.now())
        return loss


def seen(device: str, precision: str) -> tuple[list[Seen], list[Seen]]:
    """What a plain Trainer's steps find, and those of the strategy, both on a stream of their own on a GPU."""
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else torch.enable_grad():
        return _seen(device, precision, None), _seen(device, precision, Layout(waves=2))


def _seen(device: str, precision: str, layout: Layout | None) -> list[Seen]:
    module = build(Watching)
    trainer = trainer_on(device, layout, precision=precision, max_steps=2)
    trainer.fit(module, make_loader(models.vectors((8, 8))))
    return module.seen


@pytest.mark.parametrize(("device", "precision"), on_devices(PRECISIONS, cpu=["bf16-mixed"]))
def test_a_step_finds_what_a_plain_trainers_step_finds(launch: Launch, device: str, precision: str) -> None:
    ((plain, ours),) = launch(device, 1, seen, precision)
    assert {one.thread for one in ours}.isdisjoint({one.thread for one in plain}), "steps run in their own threads"
    assert all(one == plain[0] for one in plain + ours), (plain[0], next(one for one in ours if one != plain[0]))
    assert all(one.own_stream for one in ours) == (device == "cuda")


class Memory(Callback):
    """The bytes of all tensors after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(_allocated())


def _allocated() -> int:
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor}
    return sum(storage.nbytes() for storage in storages.values())


def bytes_after_steps(device: str, steps: int) -> list[int]:
    memory = Memory()
    options = {"max_steps": steps, "callbacks": [memory], "precision": "bf16-mixed"}
    trainer = trainer_on(device, Layout(waves=2), **options)
    trainer.fit(build(models.gpt), make_loader(models.windows((8,) * steps)))
    return memory.bytes


@pytest.mark.parametrize(("device", "steps"), on_devices([10], cpu=[5]))
def test_memory_stays_the_same_from_the_third_step_on(launch: Launch, device: str, steps: int) -> None:
    (after,) = launch(device, 1, bytes_after_steps, steps)
    launch.say(device, f"bytes after steps 1 to {steps}: {after}")
    assert len(after) == steps and len(set(after[2:])) == 1, after
