"""Compiled blocks compute what the same blocks compute as written: in a wave of stages, and with 3-D layers.

On a GPU inductor writes the kernels; on the CPU, where it takes half a minute, only the graphs are traced.
"""

import os
import shutil
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.gpu.conftest import Launch
from tests.harness import models
from tests.harness.devices import mean_gap, on_devices, train_on
from tests.harness.mesh import error
from tests.harness.training import Layout, Outcome

BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
ALLOWED = 1e-4
"""the mean difference of a weight after three steps of at most 3e-3; the largest error of a product, in fp32"""


def skip_without_compiler(device: str) -> None:
    """Triton compiles a launcher for each kernel."""
    if device == "cuda" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("inductor needs a C compiler")


def compile_blocks(device: str, blocks: Any) -> None:
    """Compile each block, in this process alone: other processes would outlive the test."""
    from torch._inductor import config

    warnings.simplefilter("ignore")  # inductor's own
    config.compile_threads = 1
    for block in blocks:
        block.compile(backend=BACKENDS[device])


def compiled_and_not(device: str, schedule: str) -> tuple[Outcome, Outcome]:
    """The outcomes of a wave of compiled blocks, and of the same blocks as they are written."""

    def compiled() -> models.MLP:
        model = models.MLP()
        compile_blocks(device, model.blocks)
        return model

    layout, batches = Layout(waves=2, schedule=schedule), models.vectors((8, 8, 8))
    return train_on(device, layout, compiled, batches), train_on(device, layout, models.MLP, batches)


@pytest.mark.parametrize(("device", "schedule"), on_devices(["hanayo", "hanayo-zb"], cpu=["hanayo-zb"]))
def test_compiled_blocks_train_like_those_that_are_not(launch: Launch, device: str, schedule: str) -> None:
    skip_without_compiler(device)
    ((compiled, written),) = launch(device, 1, compiled_and_not, schedule, timeout=150.0)
    gap = mean_gap(compiled, written)
    launch.say(device, f"{BACKENDS[device]}, {schedule}: mean difference of a weight {gap:g}")
    assert gap <= ALLOWED


def layer_errors(device: str, is_compiled: bool) -> dict[str, float]:
    """Errors of the loss and of all gradients of a Llama with 3-D layers on one rank."""
    torch.manual_seed(0)
    whole: Any = models.llama(blocks=2).to(device)
    model = deepcopy(whole)
    blocks = list(model.model.model.layers)
    context = StageContext(Mesh.single(), sequence_length=8)
    plan_parallelize(blocks, "layers", (1, 1, 1)).install(blocks, context)
    if is_compiled:
        compile_blocks(device, blocks)
    (batch,) = models.windows((4,))
    batch = {name: value.to(device) for name, value in batch.items()}
    losses = {one: one.loss(batch) for one in (whole, model)}
    for loss in losses.values():
        loss.backward()
    errors = {"loss": error(losses[model], losses[whole].detach())}
    return errors | {name: error(own, expected) for name, (own, expected) in _gradients(model, whole).items()}


def _gradients(model: nn.Module, whole: nn.Module) -> dict[str, tuple[Tensor | None, Tensor]]:
    own, expected = (dict(module.named_parameters()) for module in (model, whole))
    return {name: (own[name].grad, p.grad) for name, p in expected.items() if p.grad is not None}


@pytest.mark.parametrize(("device", "is_compiled"), on_devices([False, True], cpu=[False]))
def test_3d_layers_on_one_rank_compute_what_the_layers_did(launch: Launch, device: str, is_compiled: bool) -> None:
    skip_without_compiler(device)
    (errors,) = launch(device, 1, layer_errors, is_compiled, timeout=150.0)
    worst = max(errors, key=lambda name: errors[name])
    launch.say(device, f"3-D layers, {'compiled' if is_compiled else 'as written'}: {worst} {errors[worst]:g}")
    assert errors[worst] <= ALLOWED
