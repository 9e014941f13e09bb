"""Runs a batch as passes through the stack: mostly one, with forward and backward; but a step may make several.

    one pass                          the schedule's table
    the last one alone has gradients  forwards of each other pass, for all micro-batches; then the table
    otherwise                         forwards of each pass; then the backwards of the last one, of the one before, ...
    evaluation                        forwards of each pass, for those micro-batches whose steps make it

Which passes a training step makes is known when it has ended. So in the first batch of an epoch the step of
micro-batch 0 runs ahead of the others, to its end, and the table runs without the forwards that are done.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.schedule import Schedule, forward_only, last_backward_only, reduction_order, without_forwards

Part = Callable[[Schedule, Sequence[int]], Schedule]
"""What is kept of a table, for some micro-batches."""


@dataclass(eq=False, repr=False)
class Passes:
    """Runs batches on one rank of a pipeline. All of its ranks call the same methods, for the same batches.

    Args:
        engine: of this rank.
        relay: from pipeline rank 0 to the others.
        table: the schedule of a batch of that many micro-batches.
        user_step: None above pipeline rank 0.
        all_gather: gathers an object from the ranks of this rank's cube.
        end_pass: called with its number after each of several passes of a training step.
    """

    engine: Engine
    relay: Relay
    table: Callable[[int], Schedule]
    user_step: UserStep | None
    all_gather: Callable[[Any], list[Any]]
    end_pass: Callable[[int], None]
    first_batch: FirstBatch | None = None
    """examines the first training batch; None: no longer, or never"""
    late_weight: float = 1.0
    """what complete gradients are to be multiplied by: the part of the weights that losses don't have"""
    has_sums: bool = field(default=False, init=False)
    """whether gradients are there from earlier batches, which are multiplied together with the next one's"""
    _num_averaged: int = field(default=0, init=False)
    """over how many micro-batches that is a mean; 0: over none"""
    _has_warned: bool = field(default=False, init=False)
    _known: tuple[bool, ...] = field(default=(), init=False)
    """for each pass of a training step whether it has gradients; empty before the first batch"""
    _programs: dict[tuple[Any, ...], Program] = field(default_factory=dict, init=False)

    def train(self, batch: Batch, num_microbatches: int, *, is_first: bool) -> None:
        """Run forward and backward of a batch. `is_first`: of an epoch; from then on all steps make the same passes.

        Raises:
            UnsupportedError: a step makes other passes than the first one.
        """
        table, everything = self.table(num_microbatches), range(num_microbatches)
        self.engine.begin_batch()
        first_batch, self.first_batch = self.first_batch, None
        is_single = table.num_stages == 1
        if is_single:
            self._known = (True,)  # it runs the whole step, with all its passes
        done: Sequence[int] = () if first_batch is None and self._known and (is_single or not is_first) else (0,)
        with nullcontext() if first_batch is None else first_batch.recording():
            if done and is_single:
                self._forward(batch, table, done, has_gradients=True)
            elif done:
                self._know(self._run_ahead(batch, table), num_microbatches)
        if first_batch is not None:
            samples = self.relay.broadcast("batch", batch.num_samples[0] if batch.num_samples else 0)
            is_equal = len(set(self.all_gather(samples))) == 1  # the ranks of a cube run blocks equally often
            first_batch.examine(batch, samples if is_equal else 0)
            self.late_weight = first_batch.late_weight
            self._num_averaged = num_microbatches if first_batch.averages else 0
        if self._num_averaged:
            if not self.has_sums:
                self.late_weight *= self._num_averaged / num_microbatches
                self._num_averaged = num_microbatches
            self._warn_of_weights(batch.loss_weights, num_microbatches)
        if self.late_weight != 1.0:
            batch = replace(batch, loss_weights=[weight / self.late_weight for weight in batch.loss_weights])
        *others, last = self._known
        rest = [m for m in everything if m not in done]
        if last and not any(others):
            self._forwards(batch, table, rest, others)
            self._run(replace(batch, pass_number=len(others)), table, without_forwards, done)
            self._end_pass(table, len(others))
        else:
            self._forwards(batch, table, rest, self._known)
            self._backwards(batch, table, everything)
        self.engine.end_batch()

    def _warn_of_weights(self, weights: Sequence[float], num_microbatches: int) -> None:
        """Warn once if micro-batches that are added up weigh differently: what blocks add to gradients doesn't."""
        if self.user_step is None or self._has_warned:
            return
        if max(weights) > 1.001 * min(weights) or num_microbatches != self._num_averaged:
            self._has_warned = True
            warnings.warn(
                "gradients of auxiliary losses that blocks add on their own are averaged over micro-batches, and the "
                "micro-batches of this optimizer step have different weights. Give all batches a number of samples "
                "that num_microbatches divides, or let blocks store the auxiliary loss, and add it to the step's.",
                stacklevel=2,
            )

    def evaluate(self, batch: Batch, num_microbatches: int) -> None:
        """Run the forward of a batch, until all steps have ended."""
        table, number = self.table(num_microbatches), 0
        waiting: Sequence[int] = range(num_microbatches)
        self.engine.begin_batch()
        while waiting:
            self._forward(replace(batch, pass_number=number), table, waiting, has_gradients=torch.is_grad_enabled())
            waiting = self._announced(lambda user_step: user_step.waiting)
            number += 1
        self.engine.end_batch()

    def _run_ahead(self, batch: Batch, table: Schedule) -> tuple[bool, ...]:
        """Run the forwards of micro-batch 0 until its step has ended; return which of its passes have gradients."""
        found: list[bool] = []

        def next_pass(user_step: UserStep) -> bool | None:
            try:
                return user_step.next_pass(batch, 0)
            except Exception as error:
                batch.note_microbatch(error, 0)
                raise

        while (has_gradients := self._announced(next_pass)) is not None:
            self._forward(replace(batch, pass_number=len(found)), table, (0,), has_gradients=has_gradients)
            found.append(has_gradients)
            if table.num_microbatches > 1:
                self.end_pass(len(found) - 1)
        return tuple(found)

    def _announced(self, ask: Callable[[UserStep], Any]) -> Any:
        """What comes next, on all ranks of the pipeline. Asked on rank 0, where the ranks of a cube must agree.

        Raises:
            UnsupportedError: they don't.
        """
        answer = None
        if self.user_step is not None:
            answer = ask(self.user_step)
            answers = self.all_gather(answer)
            if any(other != answer for other in answers):
                raise UnsupportedError(_different_passes(self.user_step.name, answers))
        return self.relay.broadcast("pass", answer)

    def _forwards(self, batch: Batch, table: Schedule, microbatches: Sequence[int], passes: Sequence[bool]) -> None:
        for number, has_gradients in enumerate(passes):
            self._forward(replace(batch, pass_number=number), table, microbatches, has_gradients=has_gradients)
            self._end_pass(table, number)

    def _forward(self, batch: Batch, table: Schedule, microbatches: Sequence[int], *, has_gradients: bool) -> None:
        with nullcontext() if has_gradients else torch.no_grad():
            self._run(batch, table, forward_only, microbatches)

    def _backwards(self, batch: Batch, table: Schedule, microbatches: Sequence[int]) -> None:
        """Run the backwards of all passes that have one, the last pass first."""
        numbers = [number for number, has_gradients in enumerate(self._known) if has_gradients]
        for number in reversed(numbers):
            reduces = batch.reduce_gradients and number == numbers[0]
            has_loss = number == numbers[-1]
            part = replace(batch, pass_number=number, has_loss=has_loss, reduce_gradients=reduces)
            self._run(part, table, without_forwards, microbatches)
        if not numbers:
            self._run(replace(batch, reduce_gradients=False), table, last_backward_only, microbatches)
            for stage in reduction_order(table) if batch.reduce_gradients else ():
                if stage in self.engine.stages:
                    self.engine.reduce_gradients(stage)

    def _run(self, batch: Batch, table: Schedule, part: Part, microbatches: Sequence[int]) -> None:
        key = (table.num_microbatches, part, tuple(microbatches))
        if key not in self._programs:
            rank = self.relay.transport.rank
            self._programs[key] = Program.from_schedule(part(table, microbatches), rank)
        self.engine.run(self._programs[key], batch)

    def _end_pass(self, table: Schedule, number: int) -> None:
        if len(self._known) > 1 and table.num_microbatches > 1:
            self.end_pass(number)

    def _know(self, passes: tuple[bool, ...], num_microbatches: int) -> None:
        if passes != self._known and self.user_step is not None and any(passes[:-1]):
            warnings.warn(_warning(passes, self.user_step.name, num_microbatches), stacklevel=2)
        self._known = passes


def _different_passes(name: str, answers: Sequence[Any]) -> str:
    return (
        f"the steps on the ranks of a cube, whose samples differ, make different passes through {name}: "
        f"{answers}, by rank (micro-batches that go on; or whether the pass has gradients, None at the end). Let all "
        f"samples take equally many passes (generate with min_new_tokens equal to max_new_tokens), or with registered "
        f"blocks set cube_outside='replicate'."
    )


def _warning(passes: Sequence[bool], name: str, num_microbatches: int) -> str:
    way_out = (
        "Concatenate their inputs along the batch (torch.cat([chosen, rejected])), make one pass, and chunk its output."
        if sum(passes) > 1
        else "Make the passes without gradients before it."
    )
    return (
        f"the step makes {len(passes)} passes through {name}, not only the last one with gradients. So the activations "
        f"of all {num_microbatches} micro-batches are in memory at once, and forwards don't overlap with backwards. "
        f"{way_out}"
    )
