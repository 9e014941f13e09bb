"""Measures the memory of one run on this rank, and makes the report of all ranks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects
from lightning_hanayo.runtime.profiling.live_bytes import LiveBytes
from lightning_hanayo.runtime.profiling.memory_trace import MemoryTrace
from lightning_hanayo.strategy.memory.process import peak_bytes
from lightning_hanayo.strategy.memory.rank_bytes import RankBytes
from lightning_hanayo.strategy.memory.report import MemoryReport, RankReport, predict
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.process_groups import ProcessGroups

FIRST = 2
"""the batch of an epoch from which on memory is measured: before it gradients and the optimizer's states are made, and
what was sent is kept until the other rank has received it"""


class RunMemory:
    """Of the training batches of a run."""

    def __init__(self, pipeline: Pipeline, device: torch.device) -> None:
        outside = pipeline.gradients.outside
        blocks, parameters = pipeline.ownership.stack.blocks, pipeline.parameters
        self._pipeline = pipeline
        is_whole = (lambda _: False) if outside is None else outside.is_whole
        self._device = device
        self._own: RankBytes | None = None
        """of the batch that held the most"""
        self._repeats = False
        self._trace = MemoryTrace(blocks, parameters, is_whole, LiveBytes(device.type))

    @contextmanager
    def batch(self, model: nn.Module, optimizer: Iterable[Tensor]) -> Iterator[None]:
        """Inside it a training batch runs; `optimizer` are the tensors that optimizers hold."""
        engine = self._pipeline.engine
        engine.memory, unmeasured = self._trace, engine.memory
        try:
            with self._trace.batch(_tensors(model), optimizer):
                yield
        finally:
            engine.memory = unmeasured

    @contextmanager
    def step(self, model: nn.Module, optimizer: Callable[[], Iterable[Tensor]], batch_idx: int) -> Iterator[None]:
        """Inside it the optimizer steps, after the batch of that index in its epoch, which it may run."""
        with self._trace.optimizer_step():
            yield
        if batch_idx >= FIRST and self._trace.keep() and self._trace.largest is not None:
            batch = self._trace.largest
            self._repeats = batch.repeats
            if not batch.repeats:
                weights, states = self._on_device(_tensors(model)), self._on_device(optimizer())
                self._own = RankBytes.of(self._pipeline, model, batch, weights=weights, optimizer=states)

    def report(self, groups: ProcessGroups) -> MemoryReport:
        """Return the report of all ranks, which call this.

        Raises:
            HanayoError: nothing was measured.
            UnsupportedError: steps made several passes through the stack.
        """
        if self._repeats:
            raise UnsupportedError(
                "memory_report predicts steps with one pass through the stack, and these make several. Concatenate "
                "their inputs along the batch and make one pass, or measure with another tool, such as "
                "torch.cuda.max_memory_allocated()."
            )
        if self._own is None:
            raise not_measured()
        layout, process = self._pipeline.layout, peak_bytes(self._device)
        ranks = all_gather_objects(groups.control, self._own)
        table, keeps_spare = layout.table(layout.num_microbatches), self._device.type == "cpu"
        predicted, memory = predict(ranks, table, keeps_spare=keeps_spare)
        reports = [(RankReport(predicted[self._pipeline.rank], self._own.measured, process), memory)]
        for group in (groups.replica, groups.data_control):
            if group is not None:
                reports = [one for some in all_gather_objects(group, reports) for one in some]
        return MemoryReport(tuple(report for report, _ in reports), reports[0][1])

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that this rank has."""
    return (one for one in (*model.parameters(), *model.buffers()) if not one.is_meta)


def not_measured() -> HanayoError:
    """The error of a report without measurements."""
    return HanayoError(
        f"memory_report: nothing was measured. Train with HanayoStrategy(measure_memory=True), and at least "
        f"{FIRST + 1} batches in an epoch (limit_train_batches={FIRST + 1})."
    )
