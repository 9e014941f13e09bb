"""Runs a test on the CPU, as a part of the suite, and on a GPU: its cases, its training, and its comparisons."""

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from typing_extensions import override

from tests.harness.models import Batch, build
from tests.harness.oracle import split
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
)


def on_devices(cases: Iterable[Any], cpu: Iterable[Any]) -> list[Any]:
    """`(device, *case)` for `parametrize`: all cases on a GPU, and those of `cpu` on the CPU.

    Example:
        >>> @pytest.mark.parametrize(("device", "precision"), on_devices(PRECISIONS, cpu=["32-true"]))
    """
    params = [pytest.param("cpu", *_values(case)) for case in cpu]
    return params + [pytest.param("cuda", *_values(case), marks=pytest.mark.gpu) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def trainer_on(device: str, layout: Layout | None, **options: Any) -> Trainer:
    """A Trainer with HanayoStrategy on the device; a plain one if there is no layout."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    strategy = "auto" if layout is None else make_strategy(layout)
    layout = layout or Layout()
    if device == "cpu" and options.get("precision") == "16-mixed":  # Lightning knows no scaler for the CPU
        del options["precision"]
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    return make_trainer(layout, **{"accelerator": _accelerator(device, layout), "strategy": strategy} | options)


def _accelerator(device: str, layout: Layout) -> Any:
    if device == "cpu":
        return "cpu"
    return "gpu" if torch.cuda.device_count() >= layout.world_size else OneCard()


class OneCard(CUDAAccelerator):
    """All ranks share card 0."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices))

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


def train_on(
    device: str, layout: Layout | None, model: Callable[[], LightningModule], batches: list[Batch], **options: Any
) -> Outcome:
    """Train one step per batch, on one rank of the layout; returns its outcome in CPU tensors.

    Each data rank takes its own samples of the batches.
    """
    callback = OutcomeCallback()
    accumulate = options.get("accumulate_grad_batches", 1)
    if layout is not None and layout.data > 1:
        own = slice(data_rank(layout), None, layout.data)
        batches = [{name: value[own] for name, value in batch.items()} for batch in batches]
    options["callbacks"] = [callback, *options.get("callbacks", ())]
    trainer = trainer_on(device, layout, max_steps=len(batches) // accumulate, **options)
    trainer.fit(build(model), make_loader(batches))
    return on_host(callback.outcome)


def in_pieces(batches: list[Batch], num_pieces: int) -> list[Batch]:
    """The micro-batches of all batches, in order."""
    return [piece for batch in batches for piece in split(batch, num_pieces)]


ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a stream that waits for its peer holds up no other one
}
"""for all tests on GPUs: read by CUDA when a process first uses it"""
LOADED = {"CUDA_MODULE_LOADING": "EAGER"}
"""where all ranks are in one process: to load a kernel is to wait for the device, and so for all ranks' transfers"""


def with_environment(environment: dict[str, str], function: Callable[..., Any], device: str, *arguments: Any) -> Any:
    """The result of `function(device, *arguments)` in a worker that has used no GPU before, or in this environment."""
    os.environ |= environment
    return function(device, *arguments)


def be_deterministic() -> None:
    """Choose algorithms that give the same bits each time."""
    torch.use_deterministic_algorithms(True)


def on_host(outcome: Outcome) -> Outcome:
    """The same outcome in CPU tensors, which pytest's process can read without a GPU."""
    weights, gradients = ({k: v.cpu() for k, v in part.items()} for part in (outcome.weights, outcome.gradients))
    return Outcome(weights, gradients, outcome.losses)


def largest_gap(actual: Outcome, expected: Outcome) -> float:
    """The largest difference of a weight; 0 means that both trainings are equal to the last bit."""
    return _gaps(actual, expected).max().item()


def mean_gap(actual: Outcome, expected: Outcome) -> float:
    """The mean difference of a weight."""
    return _gaps(actual, expected).mean().item()


def _gaps(actual: Outcome, expected: Outcome) -> Tensor:
    assert sorted(actual.weights) == sorted(expected.weights)
    gaps = [(actual.weights[name].double() - value.double()).abs() for name, value in expected.weights.items()]
    return torch.cat([gap.flatten() for gap in gaps])
