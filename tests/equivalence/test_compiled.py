"""Blocks that inductor has compiled train on a pipeline as in one process."""

import shutil
import warnings
from functools import partial

import pytest
import torch

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout, Training, assert_same_training, run


class Compiled(models.MLP):
    def __init__(self) -> None:
        from torch._inductor import config as inductor

        super().__init__()
        warnings.simplefilter("ignore")  # inductor's own
        inductor.compile_threads = 1  # in this process: others would outlive the test
        for block in self.blocks:
            block.compile()


TRAINING = Training(Compiled, partial(models.vectors, (8, 8, 6)), torch.float64, steps=2)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(pool: Pool) -> None:
    assert_same_training(run(pool, TRAINING, Layout(2, 1, 1)), run(pool, TRAINING, Layout()))
