"""The times of actions, which are taken by events, are those that torch's profiler sees on the GPU, within 5 %.

    host        |F0|F1|B0|B1|  launches, far ahead of the GPU
    kernels             |---- F0 ----|---- F1 ----|---- B0 ----|---- B1 ----|
    actions             |---- F0 ----|---- F1 ----|---- B0 ----|---- B1 ----|

Layers are so large that the GPU is hardly ever idle in the batch, though the host starts a kernel in 30 us. On the CPU
only the comparison itself is run.
"""

from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from tests.gpu.conftest import Launch
from tests.harness.devices import on_devices, trainer_on
from tests.harness.training import Layout, make_loader

TOLERANCE = 0.05
PROFILED = 4
"""the step that is profiled, after the first ones have warmed up"""


class Wide(LightningModule):
    """Blocks of two products each: [tokens, width] -> [tokens, 4 width] -> [tokens, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(8))
        self.blocks = nn.ModuleList(pairs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Profiled(Callback):
    """Profiles the forward and the backward of one step, without what Lightning does before and after it."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        kinds = [ProfilerActivity.CUDA] if self.on_gpu else [ProfilerActivity.CPU]
        self.profile = profile(activities=kinds, acc_events=True)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == PROFILED:
            self._wait()
            self.profile.start()

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == PROFILED:
            self._wait()
            self.profile.stop()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def busy_seconds(self) -> float:
        """The time in which at least one kernel ran."""
        end, total = 0.0, 0.0
        for event in sorted(filter(self._is_kernel, self.profile.events()), key=lambda e: e.time_range.start):
            start = max(event.time_range.start, end)
            end = max(event.time_range.end, end)
            total += max(0.0, end - start)
        return total / 1e6

    def _is_kernel(self, event: FunctionEvent) -> bool:
        if self.on_gpu:
            return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        return event.cpu_parent is None


def action_and_kernel_seconds(device: str, width: int, tokens: int) -> tuple[float, float]:
    """The times of one batch's actions together, and of its kernels."""
    profiled = Profiled(device)
    layout = Layout(waves=2, num_microbatches=4)
    options = {"max_steps": PROFILED + 1, "precision": "bf16-true", "callbacks": [profiled]}
    trainer = trainer_on(device, layout, **options)
    with torch.device(device):  # a billion random values take a host half a minute
        module, batch = Wide(width), torch.randn(4 * tokens, width)
    trainer.fit(module, make_loader([batch] * (PROFILED + 1)))
    strategy: Any = trainer.strategy
    events = strategy.pipeline.engine.trace.batches[-1]
    return sum(event.end - event.start for event in events), profiled.busy_seconds()


@pytest.mark.parametrize(("device", "width", "tokens"), on_devices([(4096, 8192)], cpu=[(64, 16)]))
def test_actions_take_as_long_as_their_kernels(launch: Launch, device: str, width: int, tokens: int) -> None:
    ((actions_s, kernels_s),) = launch(device, 1, action_and_kernel_seconds, width, tokens)
    if device == "cuda" and not kernels_s:
        pytest.skip("torch's profiler sees no kernels on this machine")
    launch.say(device, f"width {width}: actions {1e3 * actions_s:.1f} ms, kernels {1e3 * kernels_s:.1f} ms")
    assert actions_s > 0 and kernels_s > 0
    if device == "cuda":
        assert actions_s == pytest.approx(kernels_s, rel=TOLERANCE)
