"""Lets Lightning's `PyTorchProfiler` see a pipeline: all threads, and steps that are under way at the same time.

main thread    F stage 0 micro-batch 0 | F stage 0 micro-batch 1 | ...      ranges of the engine
step's thread    [pl][module]...: embedding   ... suspended ...   head      ranges of modules, one set per thread
"""

import threading
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PyTorchProfiler
from torch._C._profiler import _ExperimentalConfig

from lightning_hanayo.partition.stack import Stack
from lightning_hanayo.runtime.profiling.ranges import RANGE
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def record_all_threads(module: "pl.LightningModule") -> None:
    """Let the profiler of the module's Trainer record all threads, unless the user has set its `experimental_config`.

    Called before the profiler starts. By default torch records the thread that starts it.
    """
    trainer = vars(module).get("_trainer")
    if trainer is not None and (profiler := _profiler_of(trainer)) is not None:
        profiler._profiler_kwargs.setdefault("experimental_config", _ExperimentalConfig(profile_all_threads=True))


def follow_steps(trainer: "pl.Trainer", stack: Stack, attributes: TemporaryAttributes) -> None:
    """Let the profiler name modules in steps that overlap, and the blocks of a cut stack where they really run.

    A step only records its calls of the blocks, so Lightning's hooks on them would time something else.
    """
    profiler = _profiler_of(trainer)
    register = None if profiler is None else profiler._register
    if register is None:
        return
    register._records = _RecordsByThread()
    for name, block in zip(stack.block_names, stack.blocks, strict=True):
        for handle in register._handles.pop(name, ()):
            handle.remove()
        attributes.set(block, RANGE, f"[pl][module]{type(block).__module__}.{type(block).__name__}: {name}")


class _RecordsByThread(dict[str, Any]):
    """The ranges that are open, by name, in the calling thread: several steps are in a module at the same time."""

    def __setitem__(self, name: str, record: Any) -> None:
        super().__setitem__(self._key(name), record)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    @staticmethod
    def _key(name: str) -> str:
        return f"{threading.get_ident()} {name}"


def _profiler_of(trainer: "pl.Trainer") -> PyTorchProfiler | None:
    profiler = vars(trainer)["profiler"]  # a function of Lightning's sets it
    return profiler if isinstance(profiler, PyTorchProfiler) else None
