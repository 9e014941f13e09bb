"""Runs batches on one rank of a pipeline, and sums its gradients over the ranks that share them.

A batch is run as passes through the stack: mostly one, with forward and backward; but a step may make several.

    one pass                          the schedule's table
    the last one alone has gradients  forwards of each other pass, for all micro-batches; then the table
    otherwise                         forwards of each pass; then the backwards of the last one, of the one before, ...
    evaluation                        forwards of each pass, for those micro-batches whose steps make it

Which passes a training step makes is known when it has ended. So in the first batch of an epoch the step of
micro-batch 0 runs ahead of the others, to its end, and the table runs without the forwards that are done.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.graph_boundary import stop_recomputing
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams
from lightning_hanayo.pipeline_parallel.shared_weights import SharedWeights
from lightning_hanayo.pipeline_parallel.stages import Stage
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.schedule import Schedule, forward_only, last_backward_only, reduction_order, without_forwards
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.strategy.step_state import StepState
from lightning_hanayo.tensor_parallel.boundary import AllGatherObject
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters

Part = Callable[[Schedule, Sequence[int]], Schedule]
"""Takes a part of a table, for some micro-batches."""
OUTSIDE = -1
"""stands for a stage where parameters are meant that a cube gathers for a batch"""


@dataclass
class GradientSync:
    """Sums this rank's gradients over the ranks that share them, and holds parameters whole while a batch runs.

    Args:
        stages: all-reduces each stage's gradients as soon as the stage is done.
        full_parameters: the run's `FullParameters`, which user code has asked for, and their gradients.
        outside: the parameters outside the 3-D layers of a cube, sharded between batches; None without a cube.
        outside_all_reduce: sums their shards, or shared weights', over the data ranks, after the batch.
        shards: of the optimizer, over the data ranks; None if it isn't sharded.
        shared: the weights that blocks on several pipeline ranks use; None if there are none.
    """

    stages: GradientAllReduce
    outside_all_reduce: GradientAllReduce
    full_parameters: Any
    outside: OutsideParameters | None = None
    shards: OptimizerShards | None = None
    shared: SharedWeights | None = None

    def begin_batch(self) -> None:
        """Gather the parameters that are sharded between batches, and lend shared ones."""
        if self.shared is not None:
            self.shared.begin()
        if self.outside is not None:
            self.finish_gather(OUTSIDE)
            self.outside.all_gather()

    @contextmanager
    def dry_runs(self) -> Iterator[None]:
        """Inside it all parameters of this rank can be used, but get no gradients. Called by all ranks of a cube."""
        self.finish_gather()
        if self.outside is not None:
            self.outside.all_gather(everything=True)
        try:
            yield
        finally:
            if self.outside is not None:
                self.outside.discard(keeps_gradients=True)

    def finish_gather(self, stage: int | None = None) -> None:
        """Wait until the stage's parameters, all if None, are as the optimizer's last step has left them."""
        if self.shards is not None:
            self.shards.finish(stage)

    def end_batch(self, *, reduce: bool) -> None:
        """Wait for the stages' sums, shard gathered parameters, and sum theirs over the data ranks if `reduce`."""
        self.stages.finish()
        if self.outside is not None:
            self.outside.reduce_scatter()
        if self.shared is not None:
            self.shared.end()
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
        """Drop transfers under way, after a failure."""
        self.stages.forget()
        self.full_parameters.forget()
        self.outside_all_reduce.forget()
        if self.outside is not None:
            self.outside.discard()
        if self.shared is not None:
            self.shared.take_out()

    def drop_transfers(self) -> None:
        """After a failure, when the groups have been left: free the transfers that were under way."""
        for one in (self.stages, self.outside_all_reduce, self.shards):
            if one is not None:
                one.drop_transfers()

    def _reduce_outside(self) -> None:
        self.outside_all_reduce.start(0)
        self.outside_all_reduce.finish()


@dataclass(frozen=True)
class Ends:
    """The stages with user code, of pipeline rank 0, and the runner of its step: once, or for each micro-batch."""

    user_step: UserStep
    stages: Mapping[int, Stage]
    """all of this rank, by number"""


@dataclass(eq=False, repr=False)
class Pipeline:
    """One rank of a pipeline. All ranks call the same methods, for the same batches."""

    layout: Layout
    ownership: Ownership
    rank: int
    engine: Engine
    relay: Relay
    parameters: list[nn.Parameter]
    """those that this rank trains"""
    gradients: GradientSync
    splitter: BatchSplitter
    stack_splitter: BatchSplitter
    """of batches on which the step runs once"""
    gather_in_cube: AllGatherObject
    """gathers Python objects from the ranks of this rank's cube"""
    step_state: StepState
    user_step: UserStep | None = None
    """of the batch that runs, or of the last one; None above pipeline rank 0"""
    ends: Mapping[bool, Ends] = field(default_factory=dict)
    """by whether the step runs once on a whole batch; empty above pipeline rank 0"""
    random_streams: RandomStreams = NO_STREAMS
    first_batch: FirstBatch | None = field(default=None, init=False)
    """examines the first training batch; None: no longer, or never"""
    _late_weight: float = field(default=1.0, init=False)
    """the factor for complete gradients: the part of the weights that losses don't have"""
    _has_sums: bool = field(default=False, init=False)
    """whether gradients are there from earlier batches, which are multiplied together with the next one's"""
    _num_averaged: int = field(default=0, init=False)
    """over how many micro-batches that is a mean; 0: over none"""
    _has_warned: bool = field(default=False, init=False)
    _known: tuple[bool, ...] = field(default=(), init=False)
    """for each pass of a training step whether it has gradients; empty before the first batch"""
    _programs: dict[tuple[Any, ...], Program] = field(default_factory=dict, init=False)

    @property
    def is_single(self) -> bool:
        """Whether one stage is the whole model. In a cube, the end of the step is a stage of its own."""
        return len(self.ownership.stages) == 1

    @property
    def runs_whole_batches(self) -> bool:
        """Whether the step runs in one piece, on whole batches."""
        return self.is_single and self.layout.num_microbatches == 1

    @property
    def runs_whole_steps(self) -> bool:
        """Whether the step runs in one piece on each of several micro-batches."""
        return self.is_single and self.layout.num_microbatches > 1

    def split(self, batch: Any, source: BatchSource, *, is_whole: bool) -> SplitBatch:
        """Cut a batch into micro-batches: as many as the layout has, or as it has samples.

        `is_whole`: the step is to run once on the whole batch, of which the stack alone gets micro-batches.
        """
        whole = self.ends[True].user_step if is_whole else None
        splitter = self.stack_splitter if is_whole else self.splitter
        splitter.is_uneven = isinstance(whole, WholeStep) and not whole.knows_outputs
        return splitter.split(batch, self.layout.num_microbatches, source)

    def run(
        self, batch: Batch | None = None, key: str = "", *, trains: bool, reduce: bool, is_first: bool = False
    ) -> None:
        """Run a batch, which pipeline rank 0 announces to the other ranks. Training leaves gradients in `.grad`.

        Called by all ranks of the pipeline.

        Args:
            batch: on pipeline rank 0 alone.
            key: names the batch, whose random numbers depend on it; also on pipeline rank 0 alone.
            trains: whether to run backwards.
            reduce: whether to sum gradients over data ranks.
            is_first: whether it is the first batch of an epoch.

        Raises:
            UnsupportedError: a step makes other passes than the first one of the epoch.
        """
        if batch is not None:
            self.relay.broadcast("batch", [batch.num_microbatches, batch.signature, key, batch.is_whole])
        else:
            num_microbatches, signature, key, is_whole = self.relay.broadcast("batch")
            reduces = self.reduces_in_batch(reduce)
            batch = Batch(signature, reduces, num_microbatches=num_microbatches, is_whole=is_whole)
        if self.ends:
            ends = self.ends[batch.is_whole]
            self.user_step = ends.user_step
            self.engine.stages = ends.stages
        self.gradients.begin_batch()
        with (
            self.random_streams.batch(key, has_shares=not batch.is_whole),
            self.step_state.watched(batch.num_microbatches, is_whole=batch.is_whole) if trains else nullcontext(),
            self.engine.values.batch(is_last=reduce) if trains else nullcontext(),
        ):
            self.engine.begin_batch()
            is_other = trains and batch.is_whole is not self.layout.runs_step_once
            layout = replace(self.layout, runs_step_once=batch.is_whole) if is_other else self.layout
            table = layout.table(batch.num_microbatches)
            if trains:
                self._train(batch, table, is_first=is_first)
            else:
                self._evaluate(batch, table)
            self.engine.end_batch()
        self.gradients.end_batch(reduce=reduce)
        if reduce:
            self._weigh_gradients()
        if trains:
            self._has_sums = not reduce

    def reduces_in_batch(self, reduce: bool) -> bool:
        """Whether stages start to sum their gradients while the batch runs."""
        return reduce and not self.gradients.stages.has_no_peers

    def reduce_gradients(self) -> None:
        """Sum the gradients over data ranks after a batch that didn't. Called by all ranks."""
        own = self.ownership.stages_of(self.rank)
        order = reduction_order(self.layout.table(self.layout.num_microbatches))
        self.gradients.reduce([stage for stage in order if stage in own])
        self._weigh_gradients()
        self._has_sums = False

    def close(self) -> None:
        """End the threads, once the other ranks have received this one's messages."""
        self.engine.channel.finish()
        self._leave_user_code()

    def abandon(self) -> None:
        """After a failure: drop everything under way, without waiting for other ranks, and close the connections."""
        self.engine.channel.forget()
        self.gradients.forget()
        self.step_state.forget()
        self.engine.channel.transport.close()
        self._leave_user_code()

    def _leave_user_code(self) -> None:
        """End the threads of steps, and give the blocks and their linear layers their own `forward` back."""
        for ends in self.ends.values():
            ends.user_step.close()
        blocks = self.ownership.stack.blocks
        forward_patch.unpatch_blocks(blocks)
        stop_recomputing(blocks)
        split_backward.unpatch_linear_layers(blocks)

    def _weigh_gradients(self) -> None:
        if self._late_weight != 1.0:
            own = [one.grad for one in self.parameters if one.grad is not None and one.requires_grad]
            torch._foreach_mul_(own, self._late_weight)

    def _train(self, batch: Batch, table: Schedule, *, is_first: bool) -> None:
        num_microbatches, everything = table.num_microbatches, range(table.num_microbatches)
        first_batch, self.first_batch = self.first_batch, None
        is_single = self.is_single
        if is_single:
            self._known = (True,)  # it runs the whole step, with all its passes
        done: Sequence[int] = () if first_batch is None and self._known and (is_single or not is_first) else (0,)
        if batch.is_whole:
            done = everything
        with nullcontext() if first_batch is None else first_batch.recording(runs_once=batch.is_whole):
            if done and is_single:
                self._forward(batch, table, done, has_gradients=True)
            elif done:
                passes = self._run_ahead(batch, table, done)
                if not batch.is_whole and passes != self._known and self.user_step is not None and any(passes[:-1]):
                    way_out = "Make the passes without gradients before it"
                    if sum(passes) > 1:
                        way_out = "Make one pass with concatenated inputs (torch.cat([chosen, rejected]))"
                    warnings.warn(
                        f"the step makes {len(passes)} passes through {self.user_step.name}, not only the last one "
                        f"with gradients: activations of all {num_microbatches} micro-batches are in memory at once. "
                        f"{way_out}.",
                        stacklevel=2,
                    )
                self._known = passes
        if first_batch is not None:
            samples = self.relay.broadcast("batch", batch.num_samples[0] if batch.num_samples else 0)
            whole = self.user_step if isinstance(self.user_step, WholeStep) else None
            first_batch.examine(batch, samples, whole)
            self._late_weight = first_batch.late_weight
            self._num_averaged = first_batch.num_microbatches if first_batch.averages else 0
        if self._num_averaged:
            if not self._has_sums:
                self._late_weight *= self._num_averaged / num_microbatches
                self._num_averaged = num_microbatches
            self._warn_of_weights(batch.num_samples if batch.is_whole else batch.loss_weights, num_microbatches)
        if self._late_weight != 1.0:
            batch = replace(batch, loss_weights=[weight / self._late_weight for weight in batch.loss_weights])
        *others, last = self._known
        rest = [m for m in everything if m not in done]
        if batch.is_whole:
            self._backwards(batch, table, everything)
        elif last and not any(others):
            self._forwards(batch, table, rest, others)
            program = self._program(table, without_forwards, done, is_whole=batch.is_whole)
            self.engine.run(program, replace(batch, pass_number=len(others)))
            self._end_pass(table, len(others))
        else:
            self._forwards(batch, table, rest, self._known)
            self._backwards(batch, table, everything)

    def _warn_of_weights(self, weights: Sequence[float], num_microbatches: int) -> None:
        """Warn once if micro-batches that are added up weigh differently: gradients that blocks add don't."""
        if self.user_step is None or self._has_warned:
            return
        if max(weights) > 1.001 * min(weights) or num_microbatches != self._num_averaged:
            self._has_warned = True
            warnings.warn(
                "gradients of auxiliary losses that blocks add are averaged over micro-batches, whose weights differ "
                "in this step. Let num_microbatches divide all batches, or add the loss to the step's.",
                stacklevel=2,
            )

    def _evaluate(self, batch: Batch, table: Schedule) -> None:
        """Run forwards until the steps of all micro-batches have ended."""
        number, waiting = 0, list(range(table.num_microbatches))
        while waiting:
            self._forward(replace(batch, pass_number=number), table, waiting, has_gradients=torch.is_grad_enabled())
            waiting = self._announced(lambda user_step: user_step.waiting)
            number += 1

    def _run_ahead(self, batch: Batch, table: Schedule, microbatches: Sequence[int]) -> tuple[bool, ...]:
        """Run the forwards of micro-batch 0, of all if they share one step, until its step has ended.

        Returns which of its passes have gradients.
        """
        found: list[bool] = []

        def next_pass(user_step: UserStep) -> bool | None:
            try:
                return user_step.next_pass(batch, 0)
            except Exception as error:
                batch.note_microbatch(error, 0)
                raise

        while (has_gradients := self._announced(next_pass)) is not None:
            self._forward(replace(batch, pass_number=len(found)), table, microbatches, has_gradients=has_gradients)
            found.append(has_gradients)
            if table.num_microbatches > 1 and not batch.is_whole:
                self.step_state.end_pass(len(found) - 1)
        return tuple(found)

    def _announced(self, ask: Callable[[UserStep], Any]) -> Any:
        """The answer of the user's step, on all ranks of the pipeline. On rank 0 the ranks of a cube must agree.

        Raises:
            UnsupportedError: they don't.
        """
        answer = None
        if self.user_step is not None:
            answer = ask(self.user_step)
            answers = self.gather_in_cube(answer)
            if any(other != answer for other in answers):
                raise UnsupportedError(
                    "the steps on the ranks of a cube, whose samples differ, make different passes through "
                    f"{self.user_step.name}: {answers}, by rank. Let all samples take equally many, or with "
                    "registered blocks set cube_outside='replicate'."
                )
        return self.relay.broadcast("pass", answer)

    def _forwards(self, batch: Batch, table: Schedule, microbatches: Sequence[int], passes: Sequence[bool]) -> None:
        for number, has_gradients in enumerate(passes):
            self._forward(replace(batch, pass_number=number), table, microbatches, has_gradients=has_gradients)
            self._end_pass(table, number)

    def _forward(self, batch: Batch, table: Schedule, microbatches: Sequence[int], *, has_gradients: bool) -> None:
        with nullcontext() if has_gradients else torch.no_grad():
            self.engine.run(self._program(table, forward_only, microbatches, is_whole=batch.is_whole), batch)

    def _backwards(self, batch: Batch, table: Schedule, microbatches: Sequence[int]) -> None:
        """Run the backwards of all passes that have one, the last pass first."""
        numbers = [number for number, has_gradients in enumerate(self._known) if has_gradients]
        part = without_forwards if numbers else last_backward_only
        program = self._program(table, part, microbatches, is_whole=batch.is_whole)
        for number in reversed(numbers):
            reduces = batch.reduce_gradients and number == numbers[0]
            own = replace(batch, pass_number=number, has_loss=number == numbers[-1], reduce_gradients=reduces)
            self.engine.run(program, own, continues=batch.is_whole and self._known == (True,))
        if not numbers:
            self.engine.run(program, replace(batch, reduce_gradients=False))
            for stage in reduction_order(table) if batch.reduce_gradients else ():
                if stage in self.engine.stages:
                    self.engine.reduce_gradients(stage)

    def _program(self, table: Schedule, part: Part, microbatches: Sequence[int], *, is_whole: bool) -> Program:
        key = (table.num_microbatches, is_whole, part, tuple(microbatches))
        if key not in self._programs:
            self._programs[key] = Program.from_schedule(part(table, microbatches), self.rank)
        return self._programs[key]

    def _end_pass(self, table: Schedule, number: int) -> None:
        if len(self._known) > 1 and table.num_microbatches > 1:
            self.step_state.end_pass(number)
