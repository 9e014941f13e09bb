"""MemoryReport: predicted and measured bytes of each rank, by what they are for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from lightning_hanayo.runtime.comm.point_to_point import most_buffer_bytes
from lightning_hanayo.runtime.profiling.live_bytes import MEMORY_KINDS, MemoryKind
from lightning_hanayo.schedule import CostModel, Kind, MemoryModel, RankMemory, Schedule, complete, simulate
from lightning_hanayo.schedule.dependency import target_stage
from lightning_hanayo.strategy.memory.rank_bytes import RankBytes


@dataclass(frozen=True)
class RankReport:
    """Bytes of one rank when it holds the most, by kind; see `MemoryReport`."""

    predicted: Mapping[MemoryKind, int]
    measured: Mapping[MemoryKind, int]
    process: int
    """the most that the process has held so far, code and libraries included; on an accelerator what torch's allocator
    has"""

    @property
    def predicted_peak(self) -> int:
        """All kinds together."""
        return sum(self.predicted.values())

    @property
    def measured_peak(self) -> int:
        """All kinds together."""
        return sum(self.measured.values())

    @property
    def error(self) -> float:
        """How much the prediction is above the measured peak, relative to it."""
        return self.predicted_peak / self.measured_peak - 1


@dataclass(frozen=True)
class MemoryReport:
    """What ranks hold when they hold the most, in the batch in which each held the most. `print(report)` shows a table.

    The kinds of bytes:

        weights       parameters and buffers, in a cube this rank's shards
        gradients     `.grad`; and gradients of tied weights that wait for those of the embedding
        optimizer     its states, and master weights
        gathered      what a cube holds whole while a batch runs: parameters outside the stack, and their gradients
        activations   what blocks keep for their backward
        suspended     what the user's code outside the stack keeps: embeddings, masks, logits, the loss's graph
        queue         what weight gradients still need, between `I` and `W`
        messages      on their way, and their buffers
        workspace     what the running action takes besides, or the optimizer's step
        other         batches, and what the run itself needs

    The prediction takes sizes of parameters, what one micro-batch was measured to take in each stage, and the schedule.
    """

    ranks: tuple[RankReport, ...]
    """of the world"""
    model: MemoryModel
    """of the first pipeline: `report.model.peaks(simulate(schedule))` tells what another order of the same stages, or
    another number of micro-batches of the same size, would take; without `other` and the optimizer's step"""

    def __str__(self) -> str:
        kinds = [kind for kind in MEMORY_KINDS if any(one.predicted[kind] or one.measured[kind] for one in self.ranks)]
        head = ["rank", "MB", *kinds, "peak", "process"]
        rows = []
        for rank, one in enumerate(self.ranks):
            predicted, measured = ([_megabytes(part[kind]) for kind in kinds] for part in (one.predicted, one.measured))
            rows.append([str(rank), "predicted", *predicted, _megabytes(one.predicted_peak), f"{one.error:+.1%}"])
            rows.append(["", "measured", *measured, _megabytes(one.measured_peak), _megabytes(one.process)])
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
        )


def predict(
    ranks: Sequence[RankBytes], schedule: Schedule, *, keeps_spare: bool
) -> tuple[list[dict[MemoryKind, int]], MemoryModel]:
    """The bytes that each rank of a pipeline holds when it holds the most, by kind; and the model that tells them.

    Args:
        ranks: of the pipeline, in order.
        schedule: that they run.
        keeps_spare: whether send buffers are used again, as on the CPU.
    """
    by_stage = {stage: own for rank in ranks for stage, own in rank.stages.items()}
    stages = [by_stage[stage] for stage in range(schedule.num_stages)]
    gradients = {stage: own for rank in ranks for stage, own in rank.gradients.items()}
    buffers = send_buffers(schedule, [one.message for one in stages], keeps_spare=keeps_spare)
    first = [schedule.stages_of(rank)[0] for rank in range(schedule.num_ranks)]

    def of_stages(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(one, name)) for one in stages)

    def of_ranks(values: Iterable[int]) -> tuple[float, ...]:
        """What a rank holds all the time, counted with its first stage."""
        of = dict(zip(first, values, strict=True))
        return tuple(float(of.get(stage, 0)) for stage in range(len(stages)))

    def of_gradients(*, kept: bool) -> tuple[float, ...]:
        found = enumerate(schedule.stage_ranks)
        return tuple(float(gradients[stage] if ranks[rank].keeps_gradients is kept else 0) for stage, rank in found)

    model = MemoryModel(
        activation=of_stages("activation"),
        weights=of_ranks(rank.weights for rank in ranks),
        gradients=of_gradients(kept=True),
        optimizer=of_ranks(rank.optimizer for rank in ranks),
        new_gradients=of_gradients(kept=False),
        gathered=of_ranks(rank.gathered for rank in ranks),
        suspended=of_stages("suspended"),
        tied=float(stages[0].tied),
        queue=of_stages("queue") if any(one.queue for one in stages) else None,
        message=of_stages("message"),
        send_buffers=of_ranks(buffers),
        forward_workspace=of_stages("forward_workspace"),
        backward_workspace=of_stages("backward_workspace"),
        weight_workspace=of_stages("weight_workspace"),
    )
    times = (1.0,) * len(stages)  # a loss stage takes time, too
    peaks = model.peaks(simulate(schedule, CostModel(times, times, times)))
    return [_at_peak(*one) for one in zip(ranks, peaks, buffers, strict=True)], model


def _at_peak(rank: RankBytes, batch: RankMemory, buffers: int) -> dict[MemoryKind, int]:
    """The bytes by kind at the peak of the batch, or of the optimizer's step if that is higher."""
    gradients = sum(rank.gradients.values())
    step = RankMemory(rank.weights, gradients, rank.optimizer, messages=buffers, workspace=rank.step)
    held = asdict(max(batch, step, key=lambda one: one.total)) | {"other": rank.other}
    return {kind: int(held[kind]) for kind in MEMORY_KINDS}


def send_buffers(schedule: Schedule, messages: Sequence[int], *, keeps_spare: bool) -> list[int]:
    """The bytes of each rank's send buffers, if stages have outputs of these bytes."""
    sizes = {(stage, Kind.SEND_F): size for stage, size in enumerate(messages)}
    sizes |= {(stage + 1, Kind.SEND_B): size for stage, size in enumerate(messages)}  # the gradient of that output
    held = []
    for row in complete(schedule):
        sends = []
        for action in row:
            target = target_stage(action, schedule.num_stages)
            if action.kind in (Kind.SEND_F, Kind.SEND_B) and target is not None:
                sends.append(((action.stage, action.kind), schedule.stage_ranks[target]))
        held.append(most_buffer_bytes(sends, sizes, keeps_spare=keeps_spare))
    return held


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"
