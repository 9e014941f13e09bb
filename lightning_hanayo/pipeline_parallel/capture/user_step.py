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
from functools import cache, cached_property
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.module_hooks import HookCount, check_hooks
from lightning_hanayo.pipeline_parallel.autograd import graph_boundary
from lightning_hanayo.pipeline_parallel.batch import Batch, StepFunction
from lightning_hanayo.pipeline_parallel.capture.block_tracer import BlockTracer, TracedStack
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers
from lightning_hanayo.pipeline_parallel.capture.proxy import SKIPPED_BLOCKS, Proxy, functions_on_proxies, user_line
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.threads import (
    SuspendedCall,
    SuspendedCalls,
    ThreadState,
    current_tracer,
)
from lightning_hanayo.pipeline_parallel.message import Message
from lightning_hanayo.pipeline_parallel.pytree import OutputReference
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams


class ReplacedParameters:
    """Compares the parameter objects of `model` with those at the beginning of a batch; 0.1 us each.

    `torch.func.functional_call` puts others into the modules, which the next step would find while one is suspended.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        named = () if model is None else model.named_modules()
        self._modules = [(name, module._parameters) for name, module in named if module._parameters]
        self._known: list[list[nn.Parameter | None]] = []

    def begin_batch(self) -> None:
        """Called before each batch."""
        self._known = [list(parameters.values()) for _, parameters in self._modules]

    def check(self) -> None:
        """Called when a step is suspended at the stack.

        Raises:
            UnsupportedError: a module holds another parameter than at the beginning of the batch.
        """
        for (name, parameters), known in zip(self._modules, self._known, strict=True):
            for (key, now), before in zip(parameters.items(), known, strict=True):
                if now is not before:
                    raise UnsupportedError(
                        f"{name}{name and '.'}{key} is replaced while the stack is called "
                        f"(torch.func.functional_call), but the blocks run on several ranks, and the steps of other "
                        f"micro-batches run in between. "
                        f"Call it for a module before or after the stack, or inside a block."
                    )


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

        def check(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not main and current_tracer() is None:  # not the user's code
                return run(outputs, *args, **kwargs)
            inputs = args[3] if len(args) > 3 else ()
            accumulates = trains and bool(kwargs.get("accumulate_grad"))
            self._check(_with_edges(outputs), _with_edges(inputs), accumulates=accumulates, cuts_batch=cuts_batch)
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
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, accumulates: bool, cuts_batch: bool
    ) -> None:
        """Check a call of the engine.

        Raises:
            UnsupportedError: a gradient would have to pass the stack, or be added to all parameters.
        """
        tracer = current_tracer()
        if accumulates and not inputs:
            _refuse(
                "calls backward()",
                "but the pipeline runs the backward of all blocks and micro-batches",
                "Return the loss, whose backward the pipeline runs; for gradients that the step itself needs there is "
                "torch.autograd.grad",
            )
        if tracer is not None and self._passes_stack(outputs, inputs, tracer):
            _refuse(
                "computes a gradient through the stack (torch.autograd.grad)",
                "but the blocks of the stack run on several ranks",
                "Take it with respect to the stack's output or to what comes after it, do it inside a block, or set "
                "pipeline_parallel_size=1, num_waves=1 and cube=1, where the step runs in one piece",
            )
        if cuts_batch and not self._has_warned:
            # a gradient of each sample's own output is the same in every cut of the batch
            sums = (one.dim() > 0 or type(one.grad_fn).__name__.startswith("SumBackward") for one in outputs)
            if all(sums) and not any(isinstance(one, nn.Parameter) for one in inputs):
                return
            self._has_warned = True
            warnings.warn(
                f"{user_line()} computes a gradient inside the step (torch.autograd.grad), which is that of a "
                f"micro-batch: of a sum over its samples, or with respect to a parameter. The training equals one "
                f"process that runs the same micro-batches. Set num_microbatches=1 if it must be that of the batch.",
                stacklevel=2,
            )

    def _passes_stack(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tracer: Any) -> bool:
        """Whether outputs come from the stack's output, and inputs are in front of it or in it."""
        nodes, _ = graph_boundary.reachable(outputs)
        received = [leaf for leaf in tree_leaves(tracer.received) if isinstance(leaf, Tensor)]
        if nodes.isdisjoint(leaf.grad_fn for leaf in received if leaf.grad_fn is not None):
            return False
        before, leaves = graph_boundary.reachable(tracer.sent)
        leaves |= {parameter for block in self._blocks for parameter in block.parameters()}
        return any(one in leaves if one.grad_fn is None else one.grad_fn in before for one in inputs)


class _Edge(NamedTuple):
    """A `GradientEdge` that a step has passed instead of a tensor, with those attributes of tensors that are used."""

    grad_fn: Node
    requires_grad: bool = True

    def dim(self) -> int:
        """Of a tensor with this gradient, as far as is known."""
        return 0


def _with_edges(values: Sequence[Any]) -> list[Any]:
    return [_Edge(one.node) if isinstance(one, GradientEdge) else one for one in values]


def _refuse(what: str, why: str, way_out: str) -> NoReturn:
    raise UnsupportedError(f"{user_line()} {what}, {why}. {way_out}.")


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


class StackStandIn(Protocol):
    """Takes the place of the stack in a dry run of a step."""

    output: Any
    """what the step is to get from the stack"""

    def first(self, call: Message, *, has_gradients: bool) -> Any:
        """Called with the call of the first block; return something of the structure of its output."""

    def others(self, calls: Message) -> None:
        """Called with the calls of the other blocks; afterwards `output` is there."""


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
    replaced_parameters: ReplacedParameters = field(default_factory=ReplacedParameters)
    """of the whole model"""
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
        self.replaced_parameters.begin_batch()
        self.carriers.begin_batch(self.num_local)
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
            self._under_way[microbatch] = self._start(batch, batch.step, microbatch, self.carriers)
            self._check_hooks()
        has_gradients: bool = self._under_way[microbatch].tracer.has_gradients
        return has_gradients

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
            found = ended if has_gradients is None else self._pass(microbatch)
            raise UnsupportedError(
                f"{found}, where a pass {'with' if expected else 'without'} gradients is expected{SAME_PASSES}"
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
        no_trees = (None,) * len(after.trees)  # the first block's values are delivered with the others'
        return self._run_to_last_block(batch, self._under_way[microbatch], (after.output, no_trees))

    def resume(self, batch: Batch, microbatch: int, output: Any, trees: Sequence[Any]) -> int:
        """Resume with the stack's output, and the carried trees, until the step ends or passes the stack again.

        At its end `batch.results` takes its result. Returns autograd's sequence number at the stack.
        """
        call = self._under_way[microbatch]
        tracer: BlockTracer = call.tracer
        sequence_number = tracer.sequence_number
        self._enter(batch, microbatch)
        tracer.received += [output, trees]
        with self._user_code(batch):
            call.resume((output, trees))
        if not call.done:
            self.replaced_parameters.check()
            return sequence_number
        del self._under_way[microbatch]
        self._check_whole(tracer, call.result)
        self.carriers.end(tracer.delivered)
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
                f"{self._pass(microbatch)}: the arguments of its blocks differ in structure or shape between the "
                f"ranks of a cube, whose samples are different. Pass masks always, make all sequences as long, or set "
                f"cube_outside='replicate'."
            )
        self._enter(batch, None)
        self._dry_runs[microbatch] = self._start(batch, batch.dry_run_step, microbatch, carriers)
        self.carriers.undo()
        tracer: BlockTracer = self._dry_runs[microbatch].tracer
        return tracer.take_message()

    def finish_dry_run(self, batch: Batch, microbatch: int, output: Any) -> Message:
        """Like `run_to_last_block`; then unwind the dry run."""
        self._enter(batch, None)
        message = self._run_to_last_block(batch, self._dry_runs[microbatch], (output, ()))
        self.abandon_dry_run(microbatch)
        self.carriers.undo()
        return message

    def abandon_dry_run(self, microbatch: int) -> None:
        """Unwind a dry run."""
        self._dry_runs.pop(microbatch).abandon()

    def dry_run(self, batch: Batch, stack: StackStandIn) -> Any:
        """Run `batch.dry_run_step` to its end, with a stand-in for the stack, and return its result.

        Nothing else remains of it: no logs, no changes of modules. Where no block runs in the step; or all, with no
        stand-in.
        """
        self._enter(batch, None)
        if self.num_local == self.num_blocks:
            self.streams.begin_user_code(0)
            with self._user_code(batch):
                return batch.dry_run_step(0)  # type: ignore[misc]
        call = self._start(batch, batch.dry_run_step or batch.step, 0, NO_CARRIERS)  # type: ignore[arg-type]
        try:
            while not call.done:
                first = stack.first(call.tracer.take_message(), has_gradients=call.tracer.has_gradients)
                stack.others(self._run_to_last_block(batch, call, (first, ())))
                call.tracer.received += [stack.output, ()]
                with self._user_code(batch):
                    call.resume((stack.output, ()))
            return call.result
        finally:
            call.abandon()
            self.carriers.undo()

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

    def _enter(self, batch: Batch, microbatch: int | None) -> None:
        self.carriers.enter()
        batch.on_user_code(microbatch)

    @contextmanager
    def _user_code(self, batch: Batch) -> Iterator[None]:
        # the ranks of a cube share micro-batches, too
        cuts_batch = not batch.is_whole and (len(batch.loss_weights) > 1 or self.num_local == 0)
        trains = torch.is_grad_enabled() if self._state is None else self._state.grad_mode
        checked = self._gradient_calls.checked(cuts_batch=cuts_batch, trains=trains)
        with batch.in_step(), self.guarded(), checked:
            yield

    def _tracer(self, microbatch: int) -> BlockTracer:
        return self._under_way[microbatch].tracer  # type: ignore[no-any-return]

    def _start(self, batch: Batch, function: StepFunction, microbatch: int, carriers: Carriers) -> SuspendedCall:
        state = self._state or ThreadState.current()
        tracer = BlockTracer(self, carriers, grad_mode=state.grad_mode)
        self.streams.begin_user_code(microbatch)
        with self._user_code(batch):
            call = self._calls.start(lambda: _run_step(function, microbatch), tracer, state)
        self._check_suspended(call)
        return call

    def _run_to_last_block(self, batch: Batch, call: SuspendedCall, first_output: tuple[Any, Sequence[Any]]) -> Message:
        tracer: BlockTracer = call.tracer
        tracer.received += first_output
        with self._user_code(batch):
            call.resume(first_output)
        self._check_suspended(call)
        return tracer.take_message()

    def _check_suspended(self, call: SuspendedCall) -> None:
        if call.done:
            self._check_whole(call.tracer, call.result, has_passed=False)
        self.replaced_parameters.check()

    def _check_whole(self, tracer: BlockTracer, result: Any, *, has_passed: bool = True) -> None:
        if has_passed and tracer.is_between_passes:
            return
        if tracer.num_called:
            way_out = SKIPPED_BLOCKS
        elif result is None:
            way_out = f"It returned None, but {NONE_SKIPPED}"
        else:
            way_out = (
                f"Only calls of the blocks themselves count, such as {tracer.next_block}(x): not those of modules in "
                f"them, or of other methods than forward.{self.other_lists()}"
            )
        raise UnsupportedError(
            f"the step ended after {tracer.num_called} of the {len(self.blocks)} blocks of {self.name}; "
            f"a pipeline runs whole passes through the stack, at least one for each micro-batch. {way_out}"
        )


def _run_step(function: StepFunction, microbatch: int) -> Any:
    """Run the user's step. An error about placeholders of other ranks, or about threads, becomes one with a way out."""
    try:
        return function(microbatch)
    except Exception as error:
        if isinstance(error, RuntimeError) and "meta tensor" in str(error):  # NotImplementedError is one
            raise missing_values_error("the step") from error
        if re.search(r"\bthread\b", str(error)) or isinstance(getattr(error, "obj", None), threading.local):
            raise UnsupportedError(
                f"the step uses what belongs to another thread ({type(error).__name__}: {error}). On a pipeline it "
                f"runs in threads of its own, one for each micro-batch under way, and hooks run in the main thread. "
                f"Make such an object where the step uses it, open sqlite3 with check_same_thread=False (no two of "
                f"these threads run at once), store values as attributes of the module instead of a threading.local, "
                f"or use it in a hook such as on_train_batch_start."
            ) from error
        raise


def missing_values_error(what: str) -> UnsupportedError:
    """The error for `what`, which depends on values of other ranks."""
    return UnsupportedError(
        f"{what} uses values of a block that is on another pipeline rank: a buffer, or a parameter that a hook has "
        f"kept. Let the block store the value as an attribute (self.value = self.buffer.clone()), which the step may "
        f"read. For a parameter call self.trainer.strategy.full_parameter(parameter) in on_train_batch_start, on all "
        f"ranks, and use what it returns: its gradient reaches the parameter."
    )
