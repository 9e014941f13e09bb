"""The user's step on pipeline rank 0: one suspended call of it for each micro-batch under way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.module_hooks import HookCount, check_hooks
from lightning_hanayo.runtime.batch import Batch, StepFunction
from lightning_hanayo.runtime.capture.around_stack.gradient_calls import GradientCalls
from lightning_hanayo.runtime.capture.around_stack.replaced_parameters import ReplacedParameters
from lightning_hanayo.runtime.capture.block_tracer import BlockTracer
from lightning_hanayo.runtime.capture.carried import NO_CARRIERS, Carriers
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.suspended_call import SuspendedCall, SuspendedCalls
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.random_streams import RandomStreams

_Call = tuple[SuspendedCall, BlockTracer]


@dataclass(eq=False, repr=False)
class UserStep:
    """Runs the user's step on a micro-batch in two parts: up to the stack, and from the stack's output on.

    The first `num_local` of all `blocks` run where the step calls them. Errors call the stack by its qualified `name`.
    `guarded` is entered while user code runs: it guards parameters that user code can't compute with here.
    """

    blocks: Sequence[nn.Module]
    num_local: int
    name: str
    streams: RandomStreams | None = None
    carriers: Carriers = NO_CARRIERS
    guarded: Callable[[], AbstractContextManager[None]] = nullcontext
    sends_objects: bool = True
    """whether blocks work on what the step works on, so that they may get more than tensors and plain values"""
    replaced_parameters: ReplacedParameters | None = None
    """of the whole model; None: not checked"""
    _gradient_calls: GradientCalls = field(init=False)
    _calls: SuspendedCalls = field(default_factory=SuspendedCalls, init=False)
    _under_way: dict[int, _Call] = field(default_factory=dict, init=False)
    _dry_runs: dict[int, _Call] = field(default_factory=dict, init=False)
    _num_started: int = field(default=0, init=False)
    _count_hooks: HookCount | None = field(default=None, init=False)
    _num_hooks: int = field(default=0, init=False)
    """that were there, and accepted, when they were last counted"""

    def __post_init__(self) -> None:
        self._gradient_calls = GradientCalls(self.blocks)

    def begin_batch(self) -> None:
        """Called before each batch, where the stack has several stages.

        Raises:
            UnsupportedError: since the run began, a hook was put on a module in a block.
        """
        self._check_hooks()
        if self.replaced_parameters is not None:
            self.replaced_parameters.begin_batch()
        self.carriers.begin_batch()

    def run(self, batch: Batch, microbatch: int) -> Any:
        """Run the whole step where the stack is one stage, and return what it returns."""
        assert batch.step is not None
        batch.on_user_code(microbatch)
        self._begin_random_numbers(microbatch)
        with self._user_code(batch):
            return batch.step(microbatch)

    def start(self, batch: Batch, microbatch: int) -> Message:
        """Run the step until it is suspended at the last block (at the first one, where no block runs in it).

        Returns the stage input of the recorded calls. Raises `UnsupportedError` if the step has ended without a pass
        through the stack.
        """
        assert batch.step is not None
        self._enter(batch, microbatch)
        self._under_way[microbatch] = self._start(batch, batch.step, microbatch, self.carriers)
        self._check_hooks()
        return _message(self._under_way[microbatch][1])

    def run_to_last_block(self, batch: Batch, microbatch: int, after: StageInput) -> Message:
        """Resume a step suspended at the first block with that block's output; return the calls of the other blocks."""
        self._enter(batch, microbatch)
        no_trees = (None,) * len(after.trees)  # what the first block has stored is delivered with the others' values
        return self._run_to_last_block(batch, self._under_way[microbatch], (after.output, no_trees))

    def finish(self, batch: Batch, microbatch: int, output: Any, trees: Sequence[Any]) -> tuple[Any, int]:
        """Resume with the stack's output, and what was carried.

        Returns the step's result, and autograd's sequence number at the stack.
        """
        call, tracer = self._under_way.pop(microbatch)
        self._enter(batch, microbatch)
        tracer.received += [output, trees]
        with self._user_code(batch):
            call.resume((output, trees))
        self.carriers.end(tracer.delivered)
        self._calls.release(call)
        result, call.result = call.result, None
        return result, tracer.sequence_number

    def start_dry_run(self, batch: Batch, microbatch: int) -> Message:
        """Like `start`, for `batch.dry_run_step`. What it logs, counts and stores does not count; it never ends."""
        assert batch.dry_run_step is not None
        self._enter(batch, None)
        self._dry_runs[microbatch] = self._start(batch, batch.dry_run_step, microbatch, NO_CARRIERS)
        self.carriers.undo()
        return _message(self._dry_runs[microbatch][1])

    def finish_dry_run(self, batch: Batch, microbatch: int, output: Any) -> Message:
        """Like `run_to_last_block`; then unwind the dry run."""
        self._enter(batch, None)
        call, tracer = self._dry_runs.pop(microbatch)
        message = self._run_to_last_block(batch, (call, tracer), (output, ()))
        call.abandon()
        self._calls.release(call)
        self.carriers.undo()
        return message

    def close(self) -> None:
        """Unwind the suspended steps and end the threads."""
        self._under_way.clear()
        self._dry_runs.clear()
        self._calls.close()

    def _check_hooks(self) -> None:
        if self._count_hooks is None:
            self._count_hooks = HookCount(part for block in self.blocks for part in block.modules())
        number = self._count_hooks()
        if number != self._num_hooks:
            self._num_hooks = number
            named = (block.named_modules(prefix=f"{self.name}[{i}]") for i, block in enumerate(self.blocks))
            check_hooks(chain.from_iterable(named))

    def _enter(self, batch: Batch, microbatch: int | None) -> None:
        self.carriers.enter()
        batch.on_user_code(microbatch)

    def _begin_random_numbers(self, microbatch: int) -> None:
        if self.streams is not None:
            self.streams.begin_user_code(microbatch)

    @contextmanager
    def _user_code(self, batch: Batch) -> Iterator[None]:
        cuts_batch = len(batch.loss_weights) > 1 or self.num_local == 0  # the ranks of a cube share micro-batches, too
        with self.guarded(), self._gradient_calls.checked(cuts_batch=cuts_batch):
            yield

    def _start(self, batch: Batch, function: StepFunction, microbatch: int, carriers: Carriers) -> _Call:
        tracer = BlockTracer(
            self.blocks,
            self.num_local,
            self.name,
            carriers,
            sends_objects=self.sends_objects,
            first_number=self._num_started * len(self.blocks),
        )
        self._num_started += 1
        self._begin_random_numbers(microbatch)
        with self._user_code(batch):
            call = self._calls.start(lambda: _run_step(function, microbatch), tracer)
        self._check_suspended(call, tracer)
        return call, tracer

    def _run_to_last_block(self, batch: Batch, under_way: _Call, first_output: tuple[Any, Sequence[Any]]) -> Message:
        call, tracer = under_way
        tracer.received += first_output
        with self._user_code(batch):
            call.resume(first_output)
        self._check_suspended(call, tracer)
        return _message(tracer)

    def _check_suspended(self, call: SuspendedCall, tracer: BlockTracer) -> None:
        if self.replaced_parameters is not None and not call.done:
            self.replaced_parameters.check()
        if call.done:
            self._calls.release(call)
            raise UnsupportedError(
                f"the step ended after {tracer.num_called} of the {len(self.blocks)} blocks of {self.name}; "
                f"a pipeline runs one whole pass through the stack for each micro-batch."
            )


def _message(tracer: BlockTracer) -> Message:
    """What a suspended step sends."""
    message = tracer.message
    tracer.sent += message.differentiable
    return message


def _run_step(function: StepFunction, microbatch: int) -> Any:
    """Run the user's step. An error about another rank's placeholders becomes one that names the cause."""
    try:
        return function(microbatch)
    except RuntimeError as error:  # NotImplementedError is one
        if "meta tensor" not in str(error):
            raise
        raise missing_values_error("the step") from error


def missing_values_error(what: str) -> UnsupportedError:
    """The error for `what`, which depends on what other ranks hold."""
    return UnsupportedError(
        f"{what} uses values of a block that is on another pipeline rank: a buffer, or a parameter that a hook has "
        f"kept. Let the block store the value as an attribute (self.value = self.buffer.clone()), which the step may "
        f"read. For a parameter call self.trainer.strategy.full_parameter(parameter) in on_train_batch_start, on all "
        f"ranks, and use what it returns: its gradient reaches the parameter."
    )
