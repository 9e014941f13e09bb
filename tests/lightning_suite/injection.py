"""Puts a strategy where the Trainer would choose the single CPU device, and counts the runs of the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch.multiprocessing
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes, merge
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch


def inject(strategy: str, num_microbatches: int) -> list[str]:
    """Let each Trainer that would use the single CPU device use this strategy. Called once in a process.

    Returns:
        A list that gets an entry whenever the engine runs a program.
    """
    if strategy == "ddp":
        _choose_instead(DDPStrategy)
        # DDP's launcher watches its children, none here, every 5 s, and Lightning's tests wait for that thread to end
        _ChildProcessObserver.__init__.__defaults__ = (0.01,)
    elif strategy == "hanayo":
        sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "num_microbatches": num_microbatches}
        _choose_instead(lambda: HanayoStrategy(**sizes))
        if num_microbatches > 1:
            _double_single_samples()
    return _record_runs()


def skip_tests_that_start_processes() -> None:
    """Skip a test when it is about to start ranks: those would choose their strategy themselves."""

    def skip(*_: Any, **__: Any) -> NoReturn:
        pytest.skip("starts processes")

    torch.multiprocessing.start_processes = skip
    torch.multiprocessing.spawn = skip


def _choose_instead(create: Callable[[], Strategy]) -> None:
    choose = _AcceleratorConnector._choose_strategy

    def choose_strategy(connector: _AcceleratorConnector) -> Strategy | str:
        strategy = choose(connector)
        is_single_cpu = type(strategy) is SingleDeviceStrategy and strategy.root_device.type == "cpu"
        return create() if is_single_cpu else strategy

    _AcceleratorConnector._choose_strategy = choose_strategy


def _record_runs() -> list[str]:
    runs: list[str] = []
    run = Engine.run

    def recorded(engine: Engine, *args: Any) -> None:
        runs.append("run")
        run(engine, *args)

    Engine.run = recorded
    return runs


@dataclass(frozen=True)
class _Doubled(SplitBatch):
    """One sample, run as two micro-batches. What the steps return stays that of one sample; losses are averaged."""

    def merge(self, results: Any, weights: Any, **options: Any) -> Any:
        return merge(results, PieceSizes([[0, 0]]), weights.in_mean, in_loss=weights.in_loss, **options)


def _double_single_samples() -> None:
    """Most of Lightning's tests have batches of one sample, which can't be cut: they run it twice, with half weights.

    Hooks see the batch as it is, steps get tensors of the shape that the test is written for, and the mean is the same.
    """
    split = BatchSplitter.split

    def split_or_double(splitter: BatchSplitter, batch: Any, limit: int, source: Any) -> SplitBatch:
        made = split(splitter, batch, limit, source)
        if limit == 1 or made.num_microbatches > 1:
            return made
        return _Doubled([batch] * 2, PieceSizes([[1, 1]]), range(2), [batch] * 2, lambda _: batch)

    BatchSplitter.split = split_or_double
