"""Figures of single batches for loggers, such as the bubble ratio, read without stopping the pipeline."""

from lightning_hanayo.runtime.profiling.measurement import exposed_communication, on_one_clock, stage_times, timeline_of
from lightning_hanayo.runtime.profiling.trace import BatchTrace, TraceGather, num_microbatches
from lightning_hanayo.schedule import Kind, Schedule
from lightning_hanayo.strategy.pipeline import Pipeline

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


class BatchFigures:
    """Gathers a batch's traces on pipeline rank 0 while the next batch runs.

    All ranks of the pipeline call `start` after the same batches, and `read` before the next `start`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._trace = pipeline.engine.trace
        self._table = pipeline.layout.table
        self._gather = TraceGather(pipeline.relay.transport, self._table)
        self._step = 0

    def start(self, step: int) -> None:
        """Start to gather the last batch's traces. `step` is what loggers know the batch by."""
        self._step = step
        if self._trace.batches:
            self._gather.start(self._trace.batches[-1])

    def read(self) -> tuple[int, dict[str, float]] | None:
        """On rank 0, once: the step and the figures of the batch that `start` was called for."""
        batch = self._gather.finish()
        return None if batch is None else (self._step, figures(self._table(num_microbatches(batch[0])), batch))

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._gather.forget()


def figures(schedule: Schedule, batch: BatchTrace) -> dict[str, float]:
    """Shares of all ranks' time, and each stage's mean times in milliseconds, under the names that loggers get."""
    batch = on_one_clock(schedule, batch)
    times = sorted(stage_times([batch]).items())
    return {
        "hanayo/bubble": timeline_of(schedule, batch).bubble_ratio,
        "hanayo/exposed_communication": exposed_communication(schedule, batch),
        **{f"hanayo/stage_{stage}/{_NAMES[kind]}_ms": 1e3 * seconds for (stage, kind), seconds in times},
    }
