"""The gauges: how the pipeline runs, in figures for loggers, every so many batches and without stopping it."""

from lightning_hanayo.runtime.profiling.clock import on_one_clock
from lightning_hanayo.runtime.profiling.measurement import exposed_communication, stage_times, timeline_of
from lightning_hanayo.runtime.profiling.message_timing import Batch
from lightning_hanayo.runtime.profiling.trace_gather import TraceGather, num_microbatches
from lightning_hanayo.schedule import Kind, Schedule
from lightning_hanayo.strategy.pipeline import Pipeline

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


class Gauges:
    """Reads a batch's figures on pipeline rank 0, one batch later, when the others' traces have come by themselves.

    All ranks of the pipeline call `start` after the same batches, and `read` before the next `start`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._trace = pipeline.engine.trace
        self._table = pipeline.layout.table
        self._collection = TraceGather(pipeline.chain.transport, self._table)
        self._step = 0

    def start(self, step: int) -> None:
        """Have the last batch's traces brought to rank 0. `step` is what loggers know the batch by."""
        self._step = step
        if self._trace.batches:
            self._collection.start(self._trace.batches[-1])

    def read(self) -> tuple[int, dict[str, float]] | None:
        """On rank 0 the step and the figures of the batch that `start` was called for, once."""
        batch = self._collection.take()
        return None if batch is None else (self._step, figures(self._table(num_microbatches(batch[0])), batch))

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._collection.forget()


def figures(schedule: Schedule, batch: Batch) -> dict[str, float]:
    """Shares of all ranks' time, and each stage's mean times in milliseconds, by the names that loggers get."""
    batch = on_one_clock(schedule, batch)
    times = sorted(stage_times([batch]).items())
    return {
        "hanayo/bubble": timeline_of(schedule, batch).bubble_ratio,
        "hanayo/exposed_communication": exposed_communication(schedule, batch),
        **{f"hanayo/stage_{stage}/{_NAMES[kind]}_ms": 1e3 * seconds for (stage, kind), seconds in times},
    }
