"""What one rank knows for a memory report: sizes of parameters, the bytes of one micro-batch, and what it has held."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from lightning_hanayo.runtime.profiling.live_bytes import MemoryKind
from lightning_hanayo.runtime.profiling.memory_trace import ActionBytes, BatchBytes
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.weight_gradients import gradient_dtype


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds of one micro-batch. `MemoryModel` explains each."""

    activation: int
    suspended: int
    queue: int
    tied: int
    message: int
    forward_workspace: int
    backward_workspace: int
    weight_workspace: int

    @staticmethod
    def of(actions: Mapping[Action, ActionBytes], stage: int, microbatch: int) -> "StageBytes":
        """Of a measured micro-batch: the last one, so that its backwards find the gradients of earlier ones."""
        forward, whole, backward, weight = (actions.get(Action(stage, kind, microbatch)) for kind in _KINDS)
        backward = whole or backward
        assert forward is not None and backward is not None, "a batch has a forward and a backward of each micro-batch"
        is_new = microbatch == 0  # the only micro-batch: its backward has made the gradients
        made = backward.change["gradients"] + backward.change["gathered"] if is_new else 0
        kept = sum(forward.change.values()) - forward.output
        left = 0 if weight is None else -weight.change["activations"]
        return StageBytes(
            activation=max(0, left - backward.change["activations"]),
            suspended=max(0, forward.change["suspended"]),
            queue=0 if weight is None else max(0, left - weight.change["queue"]),
            tied=0 if stage or is_new else max(0, -backward.change["gradients"]),
            message=forward.output,
            forward_workspace=max(0, forward.most - kept),
            backward_workspace=max(0, backward.most - made),
            weight_workspace=0 if weight is None else max(0, weight.most),
        )


_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class RankBytes:
    """What one rank knows."""

    weights: int
    gradients: Mapping[int, int]
    """by stage"""
    optimizer: int
    gathered: int
    """what a cube holds whole while a batch runs: parameters outside the stack, weights that are kept, and gradients of
    both"""
    keeps_gradients: bool
    """from step to step"""
    stages: Mapping[int, StageBytes]
    other: int
    """what is left after the last action besides"""
    step: int
    """the most during an optimizer's step, beyond what was there before it"""
    measured: Mapping[MemoryKind, int]
    """by kind, when there was the most"""

    @staticmethod
    def of(
        pipeline: Pipeline,
        model: nn.Module,
        batch: BatchBytes,
        *,
        weights: Iterable[Tensor],
        optimizer: Iterable[Tensor],
    ) -> "RankBytes":
        """Of a measured batch; `weights` and `optimizer` are this rank's tensors on its device, after the step."""
        outside = pipeline.gradients.outside
        shapes = {} if outside is None else {p: outside.shards[p].shape for p in outside.parameters}
        last: dict[int, int] = {}
        for action in batch.actions:
            last[action.stage] = max(last.get(action.stage, 0), action.microbatch or 0)
        return RankBytes(
            weights=_num_bytes(weights),
            gradients={
                stage: sum(_gradient_bytes(p, p.shape) for p in own if p.requires_grad and p not in shapes)
                for stage, own in ((stage, pipeline.ownership.stage_parameters(model, stage)) for stage in last)
            },
            optimizer=_num_bytes(optimizer),
            gathered=sum(p.element_size() * prod(shape) for p, shape in shapes.items())
            + sum(_gradient_bytes(p, shape) for p, shape in shapes.items() if p.requires_grad)
            + batch.kept,
            keeps_gradients=batch.begin["gradients"] > 0,
            stages={stage: StageBytes.of(batch.actions, stage, microbatch) for stage, microbatch in last.items()},
            other=batch.end["other"] + batch.end["suspended"],
            step=batch.step,
            measured=dict(batch.peak.by_kind),
        )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Shared memory counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _gradient_bytes(parameter: nn.Parameter, shape: Iterable[int]) -> int:
    return prod(shape) * gradient_dtype(parameter).itemsize
