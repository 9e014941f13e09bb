"""Converts the calls of one micro-batch's blocks to the layout inside the stack, with tensor parallelism."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd.graph_boundary import GraphCut
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.stage_input import StageInput, carried_of
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.stages.tensor_parallel_protocols import BoundaryReshard


@dataclass(eq=False)
class ShardedCalls:
    """The calls of one micro-batch's blocks, with arguments in the layout inside the stack.

    The arguments of the first block are converted first, then those of all others. If the ranks' arguments differ in
    structure (one has a mask, another has none, as its samples need no padding), the code before the stack runs again,
    as a dry run on all samples that this rank's blocks work on.
    """

    user: UserStep
    boundary: BoundaryReshard
    batch: Batch
    microbatch: int
    cut: GraphCut = field(default_factory=GraphCut)
    _inside: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """by id: a tensor outside (kept, so that its id stays its own), and the same inside"""
    _is_dry_run: bool = False

    def first(self, streams_of: Callable[[Message], list[int]]) -> Message:
        """The first block's call."""
        call = self.user.begin_pass(self.batch, self.microbatch)
        streams = streams_of(call)
        sharded = self._shard(call, streams)
        if sharded is not None:
            return Message(call.skeleton, tuple(sharded))
        outside = [self.cut.cut(call.tensors[i]) for i in streams]
        inside = self.boundary.shard_streams(self.microbatch, outside)
        self._is_dry_run = True
        call = self._start_dry_run(call)
        for i, tensor in zip(streams_of(call), inside, strict=True):
            self._inside[id(call.tensors[i])] = call.tensors[i], tensor
        return self._from_dry_run(call)

    def others(self, after: StageInput) -> Message:
        """The calls of the other blocks, after the first one has run."""
        calls = self.user.run_to_last_block(self.batch, self.microbatch, after)
        if not StageInput.from_message(calls).call_of_block:
            if self._is_dry_run:
                self.user.finish_dry_run(self.batch, self.microbatch, after.output)
            return calls
        sharded = None if self._is_dry_run else self._shard(calls, [])
        if sharded is not None:
            return Message(calls.skeleton, tuple(sharded))
        if not self._is_dry_run:
            self._start_dry_run(calls)
        made = self.user.finish_dry_run(self.batch, self.microbatch, after.output)
        return self._from_dry_run(_with_carried(made, calls))

    def _start_dry_run(self, calls: Message) -> Message:
        """Run the code before the stack on all samples; what is carried stays that of the real `calls`.

        Raises:
            UnsupportedError: the steps of the cube's ranks set attributes that blocks read to different values.
        """
        if not self.boundary.agrees(self.microbatch, carried_of(calls)):
            raise UnsupportedError(
                "an attribute that blocks read is set in the step to different values on the ranks of a cube, which "
                "have different samples. Pass it to the blocks as an argument, set it in on_train_batch_start, or set "
                "cube_outside='replicate'."
            )
        return _with_carried(self.user.start_dry_run(self.batch, self.microbatch), calls)

    def _from_dry_run(self, calls: Message) -> Message:
        """The calls that a dry run has made, with the real residual streams. Its other tensors have no graph.

        Raises:
            UnsupportedError: a block's argument has a gradient.
        """
        new = [tensor for tensor in calls.tensors if id(tensor) not in self._inside]
        if any(tensor.requires_grad for tensor in new):
            raise UnsupportedError(
                "the arguments of the blocks differ between samples of one micro-batch (a mask for some, none for "
                "others), and one of them has a gradient. Pass masks always, or set cube_outside='replicate'."
            )
        pairs = (self._inside.get(id(tensor), (tensor, tensor)) for tensor in calls.tensors)
        return Message(calls.skeleton, tuple(inside for _, inside in pairs))

    def _shard(self, calls: Message, streams: list[int]) -> list[Tensor] | None:
        """All tensors of `calls` inside; None, on all ranks, where the ranks' arguments differ in structure."""
        new = [i for i, tensor in enumerate(calls.tensors) if id(tensor) not in self._inside]
        position = {index: i for i, index in enumerate(new)}
        outside = [self.cut.cut(calls.tensors[i]) for i in new]
        positions = [position[i] for i in streams]
        inside = self.boundary.shard_arguments(self.microbatch, outside, positions, calls.skeleton)
        if inside is None:
            return None
        for i, tensor in zip(new, inside, strict=True):
            self._inside[id(calls.tensors[i])] = calls.tensors[i], tensor
        return [self._inside[id(tensor)][1] for tensor in calls.tensors]


def _with_carried(calls: Message, real: Message) -> Message:
    """The `calls` of a dry run with what the real step leaves, which has no tensors in a cube."""
    return Message((*calls.skeleton[:-1], carried_of(real)), calls.tensors)
