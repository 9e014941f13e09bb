"""The last batches of a pipeline as they ran, gathered on its rank 0, and the costs and timelines derived from them."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hanayo.checkpoint.full.gather_tensors import gather
from lightning_hanayo.planner.profile import Profile
from lightning_hanayo.plotting import save_trace
from lightning_hanayo.runtime.profiling.measurement import costs_of, median_batch, on_one_clock, timeline_of, waits_of
from lightning_hanayo.runtime.profiling.trace import BatchTrace, num_microbatches, pack, unpack
from lightning_hanayo.schedule import CostModel, Schedule, Timeline, simulate
from lightning_hanayo.strategy.pipeline import Pipeline

_TRACED = 4
"""how many batches a trace shows, one after another"""


@dataclass(frozen=True)
class MeasuredBatches:
    """Batches of one size, in the order in which they ran, and their schedule."""

    schedule: Schedule
    batches: tuple[BatchTrace, ...]

    @staticmethod
    def of(pipeline: Pipeline) -> "MeasuredBatches | None":
        """The recorded batches of full size, on rank 0 of a pipeline; None elsewhere. Called by all its ranks."""
        batches, layout = gather_traces(pipeline), pipeline.layout
        if not batches:
            return None
        whole = [one for one in batches if num_microbatches(one[0]) == layout.num_microbatches] or batches[-1:]
        schedule = layout.table(num_microbatches(whole[0][0]))
        return MeasuredBatches(schedule, tuple(on_one_clock(schedule, batch) for batch in whole))

    @cached_property
    def timeline(self) -> Timeline:
        """The batch whose duration is the median one, in seconds."""
        return timeline_of(self.schedule, median_batch(self.batches))

    @cached_property
    def costs(self) -> CostModel:
        """Times of stages and messages, in seconds."""
        return costs_of(self.schedule, self.batches)

    @cached_property
    def predicted(self) -> Timeline:
        """The same batch, simulated with `costs`."""
        return simulate(self.schedule, self.costs)

    def save_trace(self, path: Path) -> None:
        """Write a trace for ui.perfetto.dev: the last batches with their waits, and one simulated batch."""
        last = self.batches[-_TRACED:]
        timelines = {"measured": timeline_of(self.schedule, *last), "predicted": self.predicted}
        save_trace(path, timelines, seconds=1.0, waits={"measured": waits_of(*last)})

    def profile(self, pipeline: Pipeline) -> Profile:
        """A profile that the next run can plan with. A loss stage's time is added to the stage before it."""
        layout = pipeline.layout
        blocks = tuple(len(run) for run in pipeline.ownership.stages)[: layout.num_stages]
        return Profile(
            layout.schedule, layout.num_ranks, layout.num_waves, layout.num_microbatches, blocks, self._per_blocks()
        )

    def _per_blocks(self) -> CostModel:
        if not self.schedule.loss_stage:
            return self.costs
        kinds = ("forward", "backward_input", "backward_weight")
        folded: dict[str, Any] = {name: _fold(getattr(self.costs, name)) for name in kinds}
        return replace(self.costs, **folded)


def _fold(times: tuple[float, ...]) -> tuple[float, ...]:
    return (*times[:-2], times[-2] + times[-1])


def gather_traces(pipeline: Pipeline) -> list[BatchTrace]:
    """The recorded batches of all ranks of a pipeline on its rank 0; nothing elsewhere. Called by all its ranks."""
    own = pipeline.engine.trace.batches
    ranks = gather(pipeline.relay.transport, [pack(events) for events in own])
    if ranks is None:
        return []
    rows = [pipeline.layout.table(num_microbatches(events)).actions for events in own]
    return [
        [unpack(row, times[number]) for row, times in zip(table, ranks, strict=True)]
        for number, table in enumerate(rows)
    ]
