"""Figures of single batches for loggers, such as the bubble ratio, read without stopping the pipeline."""

from lightning_hanayo.runtime.profiling.measurement import exposed_communication, on_one_clock, stage_times, timeline_of
from lightning_hanayo.runtime.profiling.trace import BatchTrace, RecordedBatch, TraceGather, num_microbatches
from lightning_hanayo.schedule import Kind, Schedule
from lightning_hanayo.strategy.pipeline import Pipeline

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


class BatchFigures:
    """Gathers a batch's traces on pipeline rank 0 while later batches run, so that no rank waits.

    batch 50 ends       `start`  notes the batch: a device may still be running it
    batch 51 ends       `read`   its times are known; the other ranks send theirs
    batch 52 ends       `read`   pipeline rank 0 has received them

    All ranks of the pipeline call `start` after the same batches, and `read` after each batch, before `start`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._trace = pipeline.engine.trace
        self._table = pipeline.layout.table
        self._gather = TraceGather(pipeline.relay.transport, self._table)
        self._noted: tuple[int, RecordedBatch] | None = None
        self._step = 0
        """that of the batch which is being gathered"""

    def start(self, step: int) -> None:
        """Choose the last batch. `step` is what loggers know it by."""
        if self._trace.recorded:
            self._noted = step, self._trace.recorded[-1]

    def read(self) -> tuple[int, dict[str, float]] | None:
        """On rank 0, once for each batch that `start` was called for: its step and its figures."""
        batch, step = self._gather.finish(), self._step
        if self._noted is not None:
            self._step, recorded = self._noted
            self._gather.start(recorded.events)
            self._noted = None
        return None if batch is None else (step, figures(self._table(num_microbatches(batch[0])), batch))

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._gather.forget()
        self._noted = None


def figures(schedule: Schedule, batch: BatchTrace) -> dict[str, float]:
    """Shares of all ranks' time, and each stage's mean times in milliseconds, under the names that loggers get."""
    batch = on_one_clock(schedule, batch)
    times = sorted(stage_times([batch]).items())
    return {
        "hanayo/bubble": timeline_of(schedule, batch).bubble_ratio,
        "hanayo/exposed_communication": exposed_communication(schedule, batch),
        **{f"hanayo/stage_{stage}/{_NAMES[kind]}_ms": 1e3 * seconds for (stage, kind), seconds in times},
    }
