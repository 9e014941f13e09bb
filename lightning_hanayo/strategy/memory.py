"""The memory of ranks: predicted by the schedule from one measured micro-batch, measured, and the report of both."""

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import prod

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects
from lightning_hanayo.pipeline_parallel.p2p import most_buffer_bytes
from lightning_hanayo.pipeline_parallel.profiling.memory import (
    ActionBytes,
    AllocatedBytes,
    BatchBytes,
    LiveBytes,
    MemoryTrace,
    storage_bytes,
)
from lightning_hanayo.schedule import Action, CostModel, Kind, MemoryModel, RankMemory, Schedule, complete, simulate
from lightning_hanayo.schedule.dependency import target_stage
from lightning_hanayo.strategy.groups import ProcessGroups
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.weight_gradients import gradient_dtype

MEMORY_KINDS = (*(field.name for field in fields(RankMemory)), "other")
"""what memory is for; `MemoryReport` explains the kinds"""


def peak_bytes(device: torch.device) -> int:
    """On an accelerator what torch's allocator has held there at most; on the CPU the memory of the process (RSS)."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    peak: int = torch.get_device_module(device).max_memory_allocated(device)
    return peak


@dataclass(frozen=True)
class RankBytes:
    """What was measured on one rank."""

    fields: Mapping[str, Mapping[int, int]]
    """of `MemoryModel`, by this rank's stages; what it holds all the time counts with its first one"""
    other: int
    """what the batch holds besides"""
    step: int
    """the most during an optimizer's step, beyond what was there before it"""
    measured: int
    """when there was the most"""

    def total(self, *names: str) -> int:
        """The bytes of some fields in all stages."""
        return sum(sum(self.fields.get(name, {}).values()) for name in names)


def rank_bytes(
    pipeline: Pipeline, model: nn.Module, batch: BatchBytes, *, weights: Iterable[Tensor], optimizer: Iterable[Tensor]
) -> RankBytes:
    """Of a measured batch; `weights` and `optimizer` are this rank's tensors on its device, after the step."""
    last: dict[int, int] = {}
    for action in batch.actions:
        last[action.stage] = max(last.get(action.stage, 0), action.microbatch or 0)
    outside = pipeline.gradients.outside
    shapes = {} if outside is None else outside.gathered_shapes
    whole = sum(p.element_size() * prod(shape) for p, shape in shapes.items())
    whole_gradients = sum(_gradient_bytes(p, shape) for p, shape in shapes.items() if p.requires_grad)
    first = min(last)
    fields: dict[str, dict[int, int]] = {
        "weights": {first: storage_bytes(weights)},
        "optimizer": {first: storage_bytes(optimizer)},
        "gathered": {first: whole + whole_gradients + batch.kept},
        "gradients" if batch.keeps_gradients else "new_gradients": {
            stage: sum(_gradient_bytes(p, p.shape) for p in parameters if p.requires_grad and p not in shapes)
            for stage, parameters in pipeline.ownership.stage_parameters(model, last).items()
        },
    }
    for stage, microbatch in last.items():
        for name, num_bytes in _stage_fields(batch.actions, stage, microbatch).items():
            fields.setdefault(name, {})[stage] = max(0, num_bytes)
    return RankBytes(fields, max(0, batch.before_actions - whole), batch.step, batch.peak)


def _stage_fields(actions: Mapping[Action, ActionBytes], stage: int, microbatch: int) -> dict[str, int]:
    """Fields of `MemoryModel`, of a measured micro-batch: the last one, as its backwards make no new gradients."""
    forward, whole, split, weight = (
        actions.get(Action(stage, kind, microbatch)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    backward = whole or split
    assert forward is not None and backward is not None, "a batch has a forward and a backward of each micro-batch"
    kept = forward.change - forward.output
    found = {
        "activation": kept + forward.input - forward.suspended,
        "suspended": forward.suspended,
        "message": forward.output,
        "forward_workspace": forward.most - kept,
        "backward_workspace": backward.most - backward.gradients,
    }
    if weight is not None:
        found |= {"queue": weight.gradients - weight.change, "weight_workspace": weight.most}
    elif stage == 0 and microbatch > 0:
        # What this backward frees besides has waited for it since the loss's backward: gradients of tied weights.
        found["tied"] = backward.gradients - backward.change - backward.input - kept - forward.input
    return found


def _gradient_bytes(parameter: nn.Parameter, shape: Iterable[int]) -> int:
    return prod(shape) * gradient_dtype(parameter).itemsize


@dataclass(frozen=True)
class RankReport:
    """Bytes of one rank when it holds the most, the predicted ones by kind; see `MemoryReport`."""

    predicted: Mapping[str, int]
    measured_peak: int
    """bytes of live tensors; on an accelerator, what torch's allocator had"""
    process: int
    """the most that the process has held so far, code and libraries included; on an accelerator what torch's allocator
    has"""

    @property
    def predicted_peak(self) -> int:
        """All kinds together."""
        return sum(self.predicted.values())

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
        kinds = [kind for kind in MEMORY_KINDS if any(one.predicted[kind] for one in self.ranks)]
        head = ["MB", *kinds, "predicted", "measured", "error", "process"]
        rows = []
        for rank, one in enumerate(self.ranks):
            sizes = (*(one.predicted[kind] for kind in kinds), one.predicted_peak, one.measured_peak)
            rows.append([f"rank {rank}", *map(_megabytes, sizes), f"{one.error:+.1%}", _megabytes(one.process)])
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
        )


def predict(
    ranks: Sequence[RankBytes], schedule: Schedule, *, keeps_spare: bool
) -> tuple[list[dict[str, int]], MemoryModel]:
    """The bytes that each rank of a pipeline holds when it holds the most, by kind; and the model that tells them.

    Args:
        ranks: of the pipeline, in order.
        schedule: that they run.
        keeps_spare: whether send buffers are used again, as on the CPU.
    """
    stages = range(schedule.num_stages)
    names = {name for rank in ranks for name in rank.fields}
    values = {
        name: tuple(float(sum(rank.fields.get(name, {}).get(stage, 0) for rank in ranks)) for stage in stages)
        for name in names
    }
    buffers = send_buffers(schedule, list(map(int, values["message"])), keeps_spare=keeps_spare)
    first = {schedule.stages_of(rank)[0]: float(held) for rank, held in enumerate(buffers)}
    tied = sum(values.pop("tied", ()))
    model = MemoryModel(**values, tied=tied, send_buffers=tuple(first.get(stage, 0.0) for stage in stages))
    times = (1.0,) * len(stages)  # a loss stage takes time, too
    peaks = model.peaks(simulate(schedule, CostModel(times, times, times)))
    return [_at_peak(*one) for one in zip(ranks, peaks, buffers, strict=True)], model


def _at_peak(rank: RankBytes, batch: RankMemory, buffers: int) -> dict[str, int]:
    """The bytes by kind at the peak of the batch, or of the optimizer's step if that is higher."""
    step = RankMemory(
        weights=rank.total("weights"),
        gradients=rank.total("gradients", "new_gradients"),
        optimizer=rank.total("optimizer"),
        messages=buffers,
        workspace=rank.step,
    )
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


FIRST = 2
"""the batch of an epoch from which on memory is measured: before it gradients and the optimizer's states are made, and
what was sent is kept until the other rank has received it"""


class RunMemory:
    """Of the training batches of a run."""

    def __init__(self, pipeline: Pipeline, device: torch.device) -> None:
        self._pipeline, self._device = pipeline, device
        self._own: RankBytes | None = None
        """of the batch that held the most"""
        self._repeats = False
        held = LiveBytes() if device.type == "cpu" else AllocatedBytes(device)
        self._trace = MemoryTrace(pipeline.ownership.stack.blocks, pipeline.parameters, held)

    @property
    def peak(self) -> int:
        """The most that was held while batches were measured, which resets the peak of torch's allocator."""
        return self._trace.peak

    @contextmanager
    def batch(self, model: nn.Module, optimizer: Iterable[Tensor]) -> Iterator[None]:
        """Inside it a training batch runs; `optimizer` are the tensors that optimizers hold."""
        engine = self._pipeline.engine
        engine.memory = self._trace
        try:
            with self._trace.batch((*_tensors(model), *optimizer)):
                yield
        finally:
            engine.memory = None

    @contextmanager
    def step(self, model: nn.Module, optimizer: Callable[[], Iterable[Tensor]], batch_idx: int) -> Iterator[None]:
        """Inside it the optimizer steps, after the batch of that index in its epoch, which it may run."""
        with self._trace.optimizer_step():
            yield
        batch = self._trace.last
        if batch_idx < FIRST or (self._own is not None and batch.peak <= self._own.measured):
            return
        self._repeats = batch.repeats
        if not batch.repeats:
            weights, states = self._on_device(_tensors(model)), self._on_device(optimizer())
            self._own = rank_bytes(self._pipeline, model, batch, weights=weights, optimizer=states)

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
        layout, process = self._pipeline.layout, max(self.peak, peak_bytes(self._device))
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
