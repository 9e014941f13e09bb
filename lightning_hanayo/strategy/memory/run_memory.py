"""Measures the memory of one run on this rank, and makes the report of all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError
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
        self._trace = MemoryTrace(blocks, parameters, is_whole, LiveBytes(device.type))

    @contextmanager
    def batch(self, model: nn.Module, optimizer: Sequence[Tensor]) -> Iterator[None]:
        """Inside it a training batch runs; `optimizer` are the tensors that optimizers hold."""
        engine = self._pipeline.engine
        weights = [one for one in (*model.parameters(), *model.buffers()) if not one.is_meta]
        engine.memory, unmeasured = self._trace, engine.memory
        try:
            with self._trace.batch(weights, optimizer):
                yield
        finally:
            engine.memory = unmeasured

    @contextmanager
    def step(self, batch_idx: int) -> Iterator[None]:
        """Inside it the optimizer steps, after the batch of that index in its epoch, which it may run."""
        with self._trace.optimizer_step():
            yield
        if batch_idx >= FIRST:
            self._trace.keep()

    def report(self, model: nn.Module, optimizer: Sequence[Tensor], groups: ProcessGroups) -> MemoryReport:
        """Return the report of all ranks, which call this."""
        if self._trace.largest is None:
            raise not_measured()
        process, kind = peak_bytes(self._device), self._device.type
        held = [tensor for tensor in optimizer if tensor.device.type == kind]
        own = RankBytes.of(model, self._pipeline, self._trace.largest, optimizer=held, process=process)
        layout = self._pipeline.layout
        ranks = all_gather_objects(groups.control, own)
        predicted, memory = predict(ranks, layout.table(layout.num_microbatches), keeps_spare=kind == "cpu")
        reports = [(RankReport(predicted[self._pipeline.rank], own.measured, process), memory)]
        for group in (groups.replica, groups.data_control):
            if group is not None:
                reports = [one for some in all_gather_objects(group, reports) for one in some]
        return MemoryReport(tuple(report for report, _ in reports), reports[0][1])


def not_measured() -> HanayoError:
    """The error of a report without measurements."""
    return HanayoError(
        f"memory_report: nothing was measured. Train with HanayoStrategy(measure_memory=True), and at least "
        f"{FIRST + 1} batches in an epoch (limit_train_batches={FIRST + 1})."
    )
