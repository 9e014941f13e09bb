"""The user's step on pipeline rank 0: one suspended call of it for each micro-batch under way.

    step 0   embedding | suspended ........................ | head, loss
    step 1               embedding | suspended ......................... | head, loss

So two things of a plain step are rejected: parameters that are replaced while it calls the stack, and gradients that
would have to pass the stack.
"""

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.module_hooks import HookCount, check_hooks
from lightning_hanayo.pipeline_parallel import graph_boundary
from lightning_hanayo.pipeline_parallel.batch import Batch, StepFunction
from lightning_hanayo.pipeline_parallel.capture import code_between_blocks
from lightning_hanayo.pipeline_parallel.capture.block_tracer import BlockTracer, TracedStack
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Proxy, functions_on_proxies, user_line
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.threads import (
    SuspendedCall,
    SuspendedCalls,
    ThreadState,
    current_tracer,
)
from lightning_hanayo.pipeline_parallel.p2p import Message
from lightning_hanayo.pipeline_parallel.pytree import OutputReference
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams

Gradient = Tensor | GradientEdge
"""what a step may pass to torch.autograd.grad"""


def _node(value: Gradient) -> Node | None:
    return value.node if isinstance(value, GradientEdge) else value.grad_fn


_autograd: Any = torch.autograd


class GradientCalls:
    """Checks the calls of autograd in one rank's steps, and warns once. The stack has these `blocks`.

        grad(penalty(x), x)             before the stack, or after it: computed here
        grad(head(stack(x)), x)         rejected: the blocks' graphs are on other ranks
        loss.backward()                 rejected: the pipeline runs the backward of all stages

    torch.autograd.grad and backward both call `torch.autograd._engine_run_backward`, which is replaced while user code
    runs, as is `Function.apply`: torch would pass it proxies as objects without gradients. Nothing else runs then: the
    main thread waits for the step.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._has_warned = False

    @contextmanager
    def checked(self, *, cuts_batch: bool, trains: bool) -> Iterator[None]:
        """Entered while user code runs; `cuts_batch` says whether it runs on a part of a batch, `trains` in which step.

        In a pass without gradients of a training step the main thread's grad mode is off.
        """
        run: Callable[..., Any] = _autograd.graph._engine_run_backward
        main = threading.current_thread()

        def check(outputs: Sequence[Gradient], *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main and current_tracer() is None:  # not the user's code
                return run(outputs, *args, **kwargs)
            inputs = args[3] if len(args) > 3 else ()
            accumulates = trains and bool(kwargs.get("accumulate_grad"))
            self._check(outputs, inputs, accumulates=accumulates, cuts_batch=cuts_batch)
            return run(outputs, *args, **kwargs)

        apply = vars(torch.autograd.Function)["apply"]

        def checked_apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if kind.__module__ == checkpoint.__name__:  # it saves inputs, of which proxies are none
                args = tuple([OutputReference(one.path, one.block) if type(one) is Proxy else one for one in args])
            return functions_on_proxies(apply.__get__(None, kind), args, kwargs)

        _autograd._engine_run_backward = check
        _autograd.Function.apply = classmethod(checked_apply)
        try:
            yield
        finally:
            _autograd._engine_run_backward = run
            _autograd.Function.apply = apply

    def _check(
        self, outputs: Sequence[Gradient], inputs: Sequence[Gradient], *, accumulates: bool, cuts_batch: bool
    ) -> None:
        """Check a call of the engine.

        Raises:
            UnsupportedError: a gradient would have to pass the stack, or be added to all parameters.
        """
        tracer = current_tracer()
        if accumulates and not inputs:
            raise UnsupportedError(
                f"{user_line()} calls backward(), but the pipeline runs the backward of all blocks and micro-batches. "
                f"Return the loss; for gradients that the step itself needs there is torch.autograd.grad."
            )
        if tracer is not None and self._passes_stack(outputs, inputs, tracer):
            raise UnsupportedError(
                f"{user_line()} computes a gradient through the stack, whose blocks run on several ranks. Take it of "
                f"what comes after the stack, in a block, or set pipeline_parallel_size=1, num_waves=1 and cube=1."
            )
        if cuts_batch and not self._has_warned:
            # a gradient of each sample's own output is the same in every cut of the batch
            sums = (type(_node(one)).__name__.startswith("SumBackward") or getattr(one, "ndim", 0) for one in outputs)
            if all(sums) and not any(isinstance(one, nn.Parameter) for one in inputs):
                return
            self._has_warned = True
            warnings.warn(
                f"{user_line()} computes a gradient inside the step (torch.autograd.grad), which is that of a "
                f"micro-batch, as in one process that runs the same ones. For that of the batch: num_microbatches=1.",
                stacklevel=2,
            )

    def _passes_stack(self, outputs: Sequence[Gradient], inputs: Sequence[Gradient], tracer: Any) -> bool:
        """Whether outputs come from the stack's output, and inputs are in front of it or in it."""
        nodes, _ = graph_boundary.reachable(outputs)
        received = [leaf for leaf in tree_leaves(tracer.received) if isinstance(leaf, Tensor)]
        if nodes.isdisjoint(leaf.grad_fn for leaf in received if leaf.grad_fn is not None):
            return False
        before, leaves = graph_boundary.reachable(tracer.sent)
        leaves |= {parameter for block in self._blocks for parameter in block.parameters()}
        return any(one in leaves or _node(one) in before for one in inputs)


SAME_PASSES = (
    ". All steps of a training epoch must make the same passes as its first one, in the same order. Make a pass in "
    "each step, even where its output isn't used; or change the passes between epochs."
)
"""how errors about the number and order of passes end"""
NONE_SKIPPED = (
    "no micro-batch can be skipped, since other ranks wait for its blocks. Run the stack, and return zero times the "
    "loss (loss * 0, or output.sum() * 0 without one); or leave such samples out of the dataset."
)
"""how errors about a training step that returns None end"""


@dataclass(eq=False, repr=False)
class UserStep(TracedStack):
    """Runs the user's step on a micro-batch in parts: up to the stack, and from the stack's output on.

    A step may pass the stack several times: it is suspended in each pass, and resumed with that pass's output.

    `guarded` is entered while user code runs: it guards parameters that user code can't compute with here.
    """

    _: KW_ONLY
    streams: RandomStreams = NO_STREAMS
    carriers: Carriers = NO_CARRIERS
    guarded: Callable[[], AbstractContextManager[None]] = nullcontext
    other_lists: Callable[[], str] = str
    """how an error ends that says that the blocks weren't called: with the lists that could be the stack"""
    _under_way: dict[int, SuspendedCall] = field(default_factory=dict, init=False)
    _dry_runs: dict[int, SuspendedCall] = field(default_factory=dict, init=False)
    _state: ThreadState | None = field(default=None, init=False)
    """in which the steps of the batch begin"""
    _num_hooks: int = field(default=0, init=False)
    """that were there, and accepted, when they were last counted"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gradient_calls = GradientCalls(self.blocks)
        self._calls = SuspendedCalls(cache(self._blocks_read))

    def begin_batch(self) -> None:
        """Called before each batch, where the stack has several stages.

        Raises:
            UnsupportedError: since the run began, a hook was put on a module in a block.
        """
        self._check_hooks()
        for carrier in self.carriers:
            carrier.begin_batch(self.num_local)
        self.streams.num_local = self.num_local
        self._state = ThreadState.current()
        self._calls.context = copy_context()

    def run(self, batch: Batch, microbatch: int) -> Any:
        """Run the whole step where the stack is one stage, and return its result."""
        assert batch.step is not None
        batch.on_user_code(microbatch)
        self.streams.begin_user_code(microbatch)
        is_whole = len(batch.loss_weights) == 1  # then it may do anything, as in one process
        if is_whole:
            with self.guarded():
                result = batch.step(microbatch)
            batch.on_whole_step()
            return result
        with self._user_code(batch):
            return batch.step(microbatch)

    @property
    def waiting(self) -> list[int]:
        """The micro-batches whose steps are suspended."""
        return sorted(self._under_way)

    def next_pass(self, batch: Batch, microbatch: int) -> bool | None:
        """Whether the step's next pass has gradients; None if the step has ended. A new step is started for that."""
        if microbatch in batch.results:
            return None
        if microbatch not in self._under_way:
            assert batch.step is not None
            self._enter(batch, microbatch)
            call = self._under_way[microbatch] = self._new_call(batch, batch.step, microbatch, self.carriers)
            call.resume()
            self._check_suspended(call)
            self._check_hooks()
        return self._tracer(microbatch).has_gradients

    def begin_pass(self, batch: Batch, microbatch: int) -> Message:
        """Run the step, if it isn't yet, until it is suspended at the last block of its next pass.

        Where no block runs in the step, it is suspended at the first one. Returns the stage input of the recorded
        calls.

        Raises:
            UnsupportedError: the step has ended, or its next pass has gradients where it shouldn't, or has none.
        """
        has_gradients = self.next_pass(batch, microbatch)
        expected = torch.is_grad_enabled()
        if has_gradients != expected:
            ended = (
                f"the step of micro-batch {microbatch} has ended after {batch.pass_number} passes through {self.name}"
            )
            raise UnsupportedError(
                f"{ended if has_gradients is None else self._pass(microbatch)}, where a pass "
                f"{'with' if expected else 'without'} gradients is expected{SAME_PASSES}"
            )
        return self._tracer(microbatch).take_message()

    def _pass(self, microbatch: int) -> str:
        tracer = self._tracer(microbatch)
        how = "with gradients" if tracer.has_gradients else "without gradients (torch.no_grad)"
        where = f"at {tracer.line} " if tracer.line else ""
        return (
            f"the step of micro-batch {microbatch} {where}makes pass number {tracer.pass_number + 1} through "
            f"{self.name}, {how}"
        )

    def run_to_last_block(self, batch: Batch, microbatch: int, after: StageInput) -> Message:
        """Resume a step suspended at the first block with that block's output; return the calls of the other blocks."""
        self._enter(batch, microbatch)
        return self._run_to_last_block(self._under_way[microbatch], after.output)

    def resume(self, batch: Batch, microbatch: int, output: Any, trees: Sequence[Any]) -> int:
        """Resume with the stack's output, and the carried trees, until the step ends or passes the stack again.

        At its end `batch.results` takes its result. Returns autograd's sequence number at the stack.
        """
        call = self._under_way[microbatch]
        tracer: BlockTracer = call.tracer
        sequence_number = tracer.sequence_number
        self._enter(batch, microbatch)
        tracer.received += [output, trees]
        call.resume((output, trees))
        if not call.done:
            return sequence_number
        del self._under_way[microbatch]
        self._check_whole(tracer, call.result)
        for carrier, own in zip(self.carriers, tracer.delivered, strict=True):
            carrier.end(own)
        batch.results[microbatch], call.result = call.result, None
        return sequence_number

    def start_dry_run(self, batch: Batch, microbatch: int, carriers: Carriers = NO_CARRIERS) -> Message:
        """Like `begin_pass`, for `batch.dry_run_step`. Its logs, counts and stored values do not count; it never ends.

        Raises:
            UnsupportedError: it isn't the step's first pass.
        """
        assert batch.dry_run_step is not None
        if batch.pass_number:
            raise UnsupportedError(
                f"{self._pass(microbatch)}: the arguments of its blocks differ in structure or shape between a cube's "
                f"ranks. Pass masks always, make all sequences as long, or set cube_outside='replicate'."
            )
        self._enter(batch, None)
        call = self._dry_runs[microbatch] = self._new_call(batch, batch.dry_run_step, microbatch, carriers)
        call.resume()
        self._check_suspended(call)
        self.undo()
        return call.tracer.take_message()  # type: ignore[no-any-return]

    def finish_dry_run(self, batch: Batch, microbatch: int, output: Any) -> Message:
        """Like `run_to_last_block`; then unwind the dry run."""
        self._enter(batch, None)
        call = self._dry_runs.pop(microbatch)
        message = self._run_to_last_block(call, output)
        call.abandon()
        self.undo()
        return message

    def dry_run(self, batch: Batch, stack: Any) -> Any:
        """Run `batch.dry_run_step` to its end, with a `StandIn` for the stack, and return its result.

        Nothing else remains of it: no logs, no changes of modules. Where no block runs in the step; or all, with no
        stand-in.
        """
        self._enter(batch, None)
        assert batch.dry_run_step is not None
        if self.num_local == self.num_blocks:
            self.streams.begin_user_code(0)
            with self._user_code(batch):
                return batch.dry_run_step(0)
        call = self._new_call(batch, batch.dry_run_step, 0, NO_CARRIERS)
        try:
            call.resume()
            self._check_suspended(call)
            while not call.done:
                others = partial(self._run_to_last_block, call)
                output = stack.run(call.tracer.take_message(), others, has_gradients=call.tracer.has_gradients)
                call.tracer.received += [output, ()]
                call.resume((output, ()))
            return call.result
        finally:
            call.abandon()
            self.undo()

    def begin_loss(
        self, batch: Batch, microbatch: int, nodes: set[Node], sequence_number: int
    ) -> tuple[int, set[Node], int] | None:
        """What the loss's backward needs that is to run now: the index of the loss, and the given values.

        Args:
            batch: it.
            microbatch: whose backward begins.
            nodes: with which the graph of the code after each pass begins.
            sequence_number: autograd's at the last pass.

        Raises:
            UnsupportedError: the step is suspended in another pass.
        """
        if microbatch not in batch.results:
            raise UnsupportedError(f"{self._pass(microbatch)}, where it should have ended{SAME_PASSES}")
        return microbatch, nodes, sequence_number

    def end_backward(self, batch: Batch) -> None:
        """Called when a micro-batch's backward has reached the code before the stack."""

    def close(self) -> None:
        """Unwind the suspended steps and end the threads."""
        self._under_way.clear()
        self._dry_runs.clear()
        self._calls.close()

    def _blocks_read(self, variable: ContextVar[Any]) -> bool:
        """Whether a module that defines a class of the blocks has the variable."""
        kinds = {kind for block in self.blocks for part in block.modules() for kind in type(part).__mro__}
        modules = {sys.modules.get(kind.__module__) for kind in kinds} - {None}
        return any(value is variable for module in modules for value in list(vars(module).values()))

    @cached_property
    def _count_hooks(self) -> HookCount:
        return HookCount(part for block in self.blocks for part in block.modules())

    def _check_hooks(self) -> None:
        number = self._count_hooks()
        if number != self._num_hooks:
            self._num_hooks = number
            named = (block.named_modules(prefix=f"{self.name}[{i}]") for i, block in enumerate(self.blocks))
            check_hooks(chain.from_iterable(named))

    def undo(self) -> None:
        """Undo what a dry run has changed."""
        for carrier in self.carriers:
            carrier.undo()

    def _enter(self, batch: Batch, microbatch: int | None) -> None:
        for carrier in self.carriers:
            carrier.enter()
        batch.on_user_code(microbatch)

    @contextmanager
    def _user_code(self, batch: Batch) -> Iterator[None]:
        # the ranks of a cube share micro-batches, too
        cuts_batch = not batch.is_whole and (len(batch.loss_weights) > 1 or self.num_local == 0)
        trains = torch.is_grad_enabled() if self._state is None else self._state["grad mode"]
        checked = self._gradient_calls.checked(cuts_batch=cuts_batch, trains=trains)
        try:
            with batch.in_step(), self.guarded(), checked:
                yield
        except Exception as error:
            if self.num_local < self.num_blocks and (mended := _with_way_out(error)) is not None:
                raise mended from error
            raise

    def _tracer(self, microbatch: int) -> BlockTracer:
        return self._under_way[microbatch].tracer  # type: ignore[no-any-return]

    def _new_call(self, batch: Batch, step: StepFunction, microbatch: int, carriers: Carriers) -> SuspendedCall:
        state = self._state or ThreadState.current()
        tracer = BlockTracer(self, carriers, grad_mode=state["grad mode"])
        self.streams.begin_user_code(microbatch)
        return SuspendedCall(self._calls, partial(step, microbatch), tracer, state, partial(self._user_code, batch))

    def _run_to_last_block(self, call: SuspendedCall, first_output: Any) -> Message:
        no_trees = (None,) * len(call.tracer.carriers)  # the first block's values are delivered with the others'
        call.tracer.received += first_output, no_trees
        call.resume((first_output, no_trees))
        self._check_suspended(call)
        return call.tracer.take_message()  # type: ignore[no-any-return]

    def _check_suspended(self, call: SuspendedCall) -> None:
        if call.done:
            self._check_whole(call.tracer, call.result, has_passed=False)

    def _check_whole(self, tracer: BlockTracer, result: Any, *, has_passed: bool = True) -> None:
        if has_passed and tracer.is_between_passes:
            return
        way_out = (
            f"Only calls of the blocks themselves count, such as {tracer.next_block}(x): not those of modules in them, "
            f"or of other methods than forward.{self.other_lists()}"
        )
        if tracer.num_called:
            way_out = code_between_blocks.SKIPPED_BLOCKS
        elif result is None:
            way_out = f"It returned None, but {NONE_SKIPPED}"
        raise UnsupportedError(
            f"the step ended after {tracer.num_called} of the {len(self.blocks)} blocks of {self.name}; a pipeline "
            f"runs whole passes through the stack, at least one for each micro-batch. {way_out}"
        )


def _with_way_out(error: Exception) -> UnsupportedError | None:
    """The error for one about placeholders of other ranks, or about threads, with a way out."""
    if isinstance(error, RuntimeError) and "meta tensor" in str(error):  # NotImplementedError is one
        return missing_values_error("the step")
    if re.search(r"\bthread\b", str(error)) or isinstance(getattr(error, "obj", None), threading.local):
        return UnsupportedError(
            f"the step uses what belongs to another thread ({type(error).__name__}: {error}). On a pipeline each "
            f"micro-batch's step has a thread, hooks have the main one. Make such an object in the step, open sqlite3 "
            f"with check_same_thread=False (steps take turns), or store values in the module, not in a threading.local."
        )
    return None


def missing_values_error(what: str) -> UnsupportedError:
    """The error for `what`, which depends on values of other ranks."""
    return UnsupportedError(
        f"{what} uses values of a block that is on another pipeline rank: a buffer, or a parameter that a hook has "
        f"kept. Let the block store the value as an attribute (self.value = self.buffer.clone()); for a parameter use "
        f"what self.trainer.strategy.full_parameter(parameter) returns in on_train_batch_start, on all ranks."
    )
