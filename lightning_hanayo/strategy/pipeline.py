"""Runs batches on one rank of a pipeline, and sums its gradients over the ranks that share them."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.batches.plan import BatchSource
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.passes import Passes
from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.schedule import reduction_order
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.step_state import StepState
from lightning_hanayo.tensor_parallel.boundary import AllGatherObject
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters

OUTSIDE = -1
"""stands for a stage where parameters are meant that a cube gathers for a batch"""


class FullParameters(Protocol):
    """Whole tensors of parameters, for user code."""

    def get(self, parameter: Tensor) -> Tensor:
        """The whole of `parameter`."""

    def end_batch(self, *, reduce: bool) -> None:
        """Add the gradients of whole tensors to those of the parameters, summed over the data ranks if `reduce`."""

    def forget(self) -> None:
        """Drop all whole tensors, after a failure."""


@dataclass
class GradientSync:
    """Sums this rank's gradients over the ranks that share them, and holds parameters whole while a batch runs.

    Args:
        stages: all-reduces each stage's gradients as soon as the stage is done.
        full_parameters: whole tensors that user code has asked for, and their gradients.
        outside: the parameters outside the 3-D layers of a cube, sharded between batches; None without a cube.
        outside_all_reduce: sums their shards over the data ranks, after the batch; None where there is one.
        shards: of the optimizer, over the data ranks; None if it isn't sharded.
    """

    stages: GradientAllReduce
    full_parameters: FullParameters
    outside: OutsideParameters | None = None
    outside_all_reduce: GradientAllReduce | None = None
    shards: OptimizerShards | None = None

    def begin_batch(self) -> None:
        """Gather what is sharded between batches."""
        if self.outside is not None:
            self.finish_gather(OUTSIDE)
            self.outside.all_gather()

    def finish_gather(self, stage: int | None = None) -> None:
        """Wait until the stage's parameters, all if None, are as the optimizer's last step has left them."""
        if self.shards is not None:
            self.shards.finish(stage)

    def end_batch(self, *, reduce: bool) -> None:
        """Wait for the stages' sums, shard what was gathered, and sum that over the data ranks if `reduce`."""
        self.stages.finish()
        if self.outside is not None:
            self.outside.reduce_scatter()
        if reduce:
            self._reduce_outside()
        self.full_parameters.end_batch(reduce=reduce)

    def reduce(self, stages: list[int]) -> None:
        """Sum all gradients that are there now, stage by stage in the given order. Called by all ranks."""
        if not self.stages.has_no_peers:
            for stage in stages:
                self.stages.start(stage)
            self.stages.finish()
        self._reduce_outside()

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self.stages.forget()
        self.full_parameters.forget()
        if self.outside_all_reduce is not None:
            self.outside_all_reduce.forget()
        if self.outside is not None:
            self.outside.discard()

    def drop_transfers(self) -> None:
        """After a failure, when the groups have been left: free what was under way."""
        for one in (self.stages, self.outside_all_reduce, self.shards):
            if one is not None:
                one.drop_transfers()

    def _reduce_outside(self) -> None:
        if self.outside_all_reduce is not None:
            self.outside_all_reduce.start(0)
            self.outside_all_reduce.finish()


@dataclass
class Pipeline:
    """One rank of a pipeline. Pipeline rank 0 leads each batch, the ranks above it follow."""

    layout: Layout
    ownership: Ownership
    rank: int
    engine: Engine
    relay: Relay
    parameters: list[nn.Parameter]
    """those that this rank trains"""
    gradients: GradientSync
    splitter: BatchSplitter
    gather_in_cube: AllGatherObject
    """gathers Python objects from the ranks of this rank's cube"""
    step_state: StepState
    user_step: UserStep | None = None
    """None above pipeline rank 0"""
    random_streams: RandomStreams | None = None
    """None: random numbers come from torch's own generators, unchanged"""
    _passes: Passes = field(init=False)

    def __post_init__(self) -> None:
        self._passes = Passes(
            self.engine, self.relay, self.layout.table, self.user_step, self.gather_in_cube, self.step_state.end_pass
        )

    def begin_training(self, first_batch: FirstBatch) -> None:
        """Examine the next training batch, which is the first one."""
        self._passes.first_batch = first_batch

    @property
    def runs_whole_batches(self) -> bool:
        """Whether the step runs in one piece, on whole batches."""
        return self.layout.num_stages == 1 and self.layout.num_microbatches == 1

    @property
    def runs_whole_steps(self) -> bool:
        """Whether the step runs in one piece on each of several micro-batches."""
        return self.layout.num_stages == 1 and self.layout.num_microbatches > 1

    def split(self, batch: Any, source: BatchSource) -> SplitBatch:
        """Cut a batch into micro-batches: as many as the layout has, or as it has samples."""
        return self.splitter.split(batch, self.layout.num_microbatches, source)

    def lead(
        self, batch: Batch, num_microbatches: int, key: str, *, trains: bool, reduce: bool, is_first: bool
    ) -> None:
        """On pipeline rank 0: announce a batch and run it. Training leaves its gradients in `.grad`.

        `key` names the batch; its random numbers depend on it. `trains` says whether to run backwards, `reduce` whether
        to sum gradients over data ranks, `is_first` whether it is the first of an epoch.
        """
        self.relay.broadcast("batch", [num_microbatches, batch.signature, key])
        self._run(batch, num_microbatches, key, trains=trains, reduce=reduce, is_first=is_first)

    def follow(self, *, trains: bool, reduce: bool, is_first: bool) -> None:
        """On the other pipeline ranks: run the batch that pipeline rank 0 announces. Arguments as for `lead`."""
        num_microbatches, signature, key = self.relay.broadcast("batch")
        batch = Batch(signature, self.reduces_in_batch(reduce), num_microbatches=num_microbatches)
        self._run(batch, num_microbatches, key, trains=trains, reduce=reduce, is_first=is_first)

    def reduces_in_batch(self, reduce: bool) -> bool:
        """Whether stages start to sum their gradients while the batch runs."""
        return reduce and not self.gradients.stages.has_no_peers

    def reduce_gradients(self) -> None:
        """Sum the gradients over data ranks after a batch that didn't. Called by all ranks."""
        own = self.ownership.stages_of(self.rank)
        order = reduction_order(self.layout.table(self.layout.num_microbatches))
        self.gradients.reduce([stage for stage in order if stage in own])
        self._weigh_gradients()
        self._passes.has_sums = False

    def close(self) -> None:
        """End the threads, once the other ranks have received what this one sent."""
        self.engine.channel.finish()
        if self.engine.pairs is not None:
            self.engine.pairs.close()
        self._stop_user_code()

    def abandon(self) -> None:
        """After a failure: drop everything under way, without waiting for other ranks, and close the connections."""
        self.engine.channel.forget()
        if self.engine.pairs is not None:
            self.engine.pairs.abandon()
        self.gradients.forget()
        self.step_state.forget()
        self.engine.channel.transport.close()
        self._stop_user_code()

    def _stop_user_code(self) -> None:
        if self.user_step is not None:
            self.user_step.close()

    def _run(
        self, batch: Batch, num_microbatches: int, key: str, *, trains: bool, reduce: bool, is_first: bool
    ) -> None:
        self.gradients.begin_batch()
        with (
            self.random_streams.batch(key) if self.random_streams is not None else nullcontext(),
            self.step_state.watched(num_microbatches) if trains else nullcontext(),
            self.engine.values.batch(is_last=reduce) if trains else nullcontext(),
        ):
            if trains:
                self._passes.train(batch, num_microbatches, is_first=is_first)
            else:
                self._passes.evaluate(batch, num_microbatches)
        self.gradients.end_batch(reduce=reduce)
        if reduce:
            self._weigh_gradients()
        if trains:
            self._passes.has_sums = not reduce

    def _weigh_gradients(self) -> None:
        if self._passes.late_weight != 1.0:
            own = [one.grad for one in self.parameters if one.grad is not None and one.requires_grad]
            torch._foreach_mul_(own, self._passes.late_weight)
