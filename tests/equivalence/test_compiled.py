"""Compiled blocks train on a pipeline and in a cube as in one process."""

import shutil
import warnings
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from tests.harness import models
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.training import Layout, Training, assert_close, assert_same_training, run


def prepare_inductor() -> None:
    """Compile in this process: others would outlive the test."""
    from torch._inductor import config as inductor

    warnings.simplefilter("ignore")  # inductor's own
    inductor.compile_threads = 1


class Compiled(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        prepare_inductor()
        for block in self.blocks:
            block.compile()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
TRAINING = Training(Compiled, partial(models.vectors, (8, 8, 6)), torch.float64, steps=2)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@needs_compiler
def test_compiled_by_inductor(pool: Pool) -> None:
    assert_same_training(run(pool, TRAINING, Layout(2, 1, 1)), run(pool, TRAINING, Layout()))


class Encoder(models.Trained):
    """Blocks that a cube parallelizes whole."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        prepare_inductor()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(models.WIDTH, 4, 32, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.embedding = nn.Embedding(models.VOCABULARY, models.WIDTH)
        self.head = nn.Linear(models.WIDTH, models.CLASSES)
        if backend is not None:
            for layer in self.layers:
                layer.compile(backend=backend, fullgraph=True)

    def loss(self, batch: models.Batch) -> Tensor:
        hidden = self.embedding(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden[:, 0]), batch["input_ids"][:, 1] % models.CLASSES)


IN_CUBES = [
    pytest.param("aot_eager", Layout(cube=(1, 1, 2)), marks=pytest.mark.thorough),
    pytest.param("aot_eager", Layout(2, 1, 1, cube=(2, 1, 2), schedule="hanayo-zb"), marks=pytest.mark.thorough),
    pytest.param("inductor", Layout(cube=(1, 1, 2)), marks=[needs_compiler, pytest.mark.thorough]),
    pytest.param("inductor", Layout(cube=(2, 1, 1), weights="batch"), marks=[needs_compiler, pytest.mark.thorough]),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("backend", "layout"),
    IN_CUBES,
    ids=str,
)
def test_compiled_blocks_in_a_cube(pool: Pool, backend: str, layout: Layout) -> None:
    data = partial(models.windows, (8, 8))
    plainly = Training(partial(Encoder, None), data, torch.float64, steps=2)
    compiled = Training(partial(Encoder, backend), data, torch.float64, steps=2)
    assert_close(run(pool, compiled, layout).weights, plain(pool, plainly).weights, 1e-9)


def llama(backend: str | None) -> LightningModule:
    """Layers that read one input hand their outputs on by an attribute."""
    prepare_inductor()
    module: Any = models.llama(heads=4, kv_heads=2)
    for block in module.model.model.layers if backend is not None else ():
        block.compile(backend=backend, fullgraph=True)
    return cast("LightningModule", module)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(cube=(1, 2, 1), recompute="blocks"), marks=pytest.mark.thorough),
        pytest.param(Layout(2, 1, 1, cube=(2, 1, 1), recompute="attention"), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_compiled_blocks_in_a_cube_are_recomputed(pool: Pool, layout: Layout) -> None:
    data = partial(models.texts, (8, 8))
    plainly = Training(partial(llama, None), data, torch.float64, steps=2)
    compiled = Training(partial(llama, "aot_eager"), data, torch.float64, steps=2)
    assert_close(run(pool, compiled, layout).weights, run(pool, plainly, layout).weights, 1e-9)
