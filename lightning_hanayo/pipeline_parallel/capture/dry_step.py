"""A dry run of the user's step on some samples, on pipeline rank 0 alone: the first block stands in for the stack.

    step    embedding of some samples |suspended               | loss
    here                               block 0, its output  ->   for the whole stack

Nothing remains of it but what it has shown: buffers, attributes, logs, metrics and random numbers are as before.
"""

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import pytree
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.state import is_metric, undone
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.p2p import Message

State = dict[str, float | Tensor]
Given = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""What the step is to get from the stack, by the number of the tensor, and the first block's output."""


class RefusedAfterStack(Exception):
    """Code after the stack does what a dry run can't, such as a collective. The step may run on a whole batch."""


@dataclass
class StandIn:
    """Takes the place of the stack in a dry run."""

    first_block: Callable[[Message], Any]
    given: Given
    calls: list[Message] = field(default_factory=list)
    """of the blocks: for each pass the first one's, and the others'"""
    tensors: list[Tensor] = field(default_factory=list)
    """that the step has got, of all passes: leaves, if they have gradients"""
    num_bytes: int = 0
    """of all tensors that the first block has made"""

    def run(self, call: Message, others: Callable[[Any], Message], *, has_gradients: bool) -> Any:
        """Run the first block, and return an output of the stack. What it changes in arguments, it changes in copies.

        `others` makes the calls of the other blocks, after this output of the first one.
        """
        copies = Message(call.skeleton, tuple([tensor.detach().clone() for tensor in call.tensors]))
        with torch.no_grad(), _CountedBytes() as counted:
            output = self.first_block(copies)
        self.num_bytes += counted.num_bytes
        flattener = pytree.Flattener()
        skeleton = flattener.flatten(output, "the output of a block")
        calls = others(output)
        given = [one.detach().clone() for one in self.given(len(self.tensors), flattener.tensors)]
        for one in given:
            one.requires_grad_(has_gradients and one.is_floating_point())
        self.tensors += given
        output, stage_input = pytree.unflatten(skeleton, given), StageInput.from_message(calls)
        self.calls += call, calls
        if stage_input.num_blocks == len(stage_input.call_of_block):
            return output
        blocks = [_Returns(output) for _ in range(stage_input.num_blocks)]  # between them code, after each this output
        return stage_input.after([output], 0, ()).run(blocks, is_last=True).output


class _Returns(nn.Module):
    """A block that returns always the same."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


@dataclass
class Ran:
    """What a dry run has shown."""

    result: Any
    calls: list[Message]
    tensors: list[Tensor]
    """that the step has got from the stack"""
    num_bytes: int
    """of all tensors that it has made outside the stack"""
    block_bytes: int
    """of those that the first block has made"""
    before: State
    """by name, numbers and buffers of modules that it changes"""
    after: State
    """the same, as it leaves them"""


@dataclass(eq=False, repr=False)
class DrySteps:
    """Runs dry steps."""

    user: UserStep
    """runs steps, in which no block runs, or all"""
    model: nn.Module
    """the user's module"""
    outside: Sequence[nn.Module]
    """the modules outside the stack, whose buffers are as before afterwards"""
    first_block: Callable[[Message, int], Any] | None = None
    """runs the first block on its call for so many samples, in a cube together with the other ranks, and returns its
    output; it may change the call's tensors; None: it runs as it is"""
    in_cube: Callable[[Any], list[Any]] = lambda value: [value]
    """gathers objects from the ranks of the cube, which run the same dry steps"""

    def __post_init__(self) -> None:
        blocks = self.user.blocks
        self._failed_elsewhere: Exception | None = None
        """the error of the same dry run on another rank of the cube"""
        self._runs_blocks = self.user.num_local == len(blocks)
        """whether steps run all blocks themselves"""
        self._modules = [*self.outside, *(part for block in blocks[:1] for part in block.modules())]
        ids = {id(module) for module in self.outside if not is_metric(module)}
        named = ((name, module) for name, module in self.model.named_modules() if id(module) in ids)
        self._by_prefix = {f"{name}." if name else "": module for name, module in named}

    def run(
        self,
        step: Callable[[Any], Any],
        samples: Any,
        num_samples: int,
        given: Given = lambda _, made: made,
        *,
        after: State | None = None,
    ) -> Ran:
        """Run the step on so many samples, which it may change, without dropout.

        `given`: makes what the step gets from the stack; else that is the first block's output. `after`: what another
        run has left, before this one.

        Raises:
            RefusedAfterStack: code after the stack does what a dry run can't.
            UnsupportedError: so does code in front of it, or the blocks' arguments can't be cut.
        """

        def first_block(call: Message) -> Any:
            self._agree()
            if self.first_block is not None:
                return self.first_block(call, num_samples)
            return StageInput.from_message(call).run(user.blocks[:1], is_last=len(user.blocks) == 1).output

        counted, stand_in = _CountedBytes(), StandIn(first_block, given)
        before: State = {}
        now: State = {}

        def run(_: int) -> Any:
            self._set(after or {})
            before.update(self._state())
            with _WithoutDropout(), counted:
                result = step(samples)
            now.update(self._state())
            return result

        batch = Batch(dry_run_step=run, is_whole=True, loss_weights=[1.0])
        parts = (vars(part).items() for part in self.model.modules())
        hooks = (value for items in parts for key, value in items if key.endswith("_hooks"))
        quiet = warnings.catch_warnings(), redirect_stdout(io.StringIO())
        user = self.user  # where steps run all blocks, no carriers undo what they set
        state = undone(self.model, user.blocks, user.name) if self._runs_blocks else kept_buffers(self._modules)
        with quiet[0], quiet[1], _kept(hooks), state, torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")  # of few samples, say: real steps warn, too
            try:
                result = self._run(batch, stand_in)
            except UnsupportedError as error:
                if not stand_in.calls and not self._runs_blocks:
                    raise
                raise RefusedAfterStack(str(error)) from error
        changed = [name for name in before.keys() & now.keys() if not _is_same(before[name], now[name])]
        states = ({name: state[name] for name in changed} for state in (before, now))
        return Ran(result, stand_in.calls, stand_in.tensors, counted.num_bytes, stand_in.num_bytes, *states)

    def _run(self, batch: Batch, stand_in: StandIn) -> Any:
        """Run it on all ranks of the cube, or on none."""
        try:
            result = copy_context().run(self.user.dry_run, batch, stand_in)
        except Exception as error:
            if error is not self._failed_elsewhere:
                self._agree(error)
            raise
        self._agree()
        return result

    def _agree(self, error: Exception | None = None) -> None:
        """Agree before each call of the first block, and at the end of a run, that no rank of the cube has failed."""
        own = None if error is None else (str(error), isinstance(error, UnsupportedError))
        other = next((one for one in self.in_cube(own) if one is not None), None)
        if other is not None and own is None:
            what, is_refused = other
            self._failed_elsewhere = UnsupportedError(what) if is_refused else RuntimeError(what)
            raise self._failed_elsewhere

    def _state(self) -> State:
        """The numbers and buffers of modules outside the stack, but for what metrics count."""
        found: State = {}
        for name, module in self._by_prefix.items():
            for key, value in vars(module).items():
                if type(value) in (int, float):
                    found[f"{name}{key}"] = value
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found[f"{name}{key}"] = buffer.clone()
        return found

    def _set(self, state: State) -> None:
        for path, value in state.items():
            name, _, key = path.rpartition(".")
            module = self._by_prefix[f"{name}." if name else ""]
            (module._buffers if isinstance(value, Tensor) else vars(module))[key] = value

    @contextmanager
    def running(self) -> Iterator[None]:
        """To be open while dry steps run, outside of batches."""
        self.user.begin_batch()
        with self.user.streams.batch("dry runs", has_shares=False):
            yield


class _WithoutDropout(TorchFunctionMode):
    _PLAIN = frozenset(
        {
            functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
            functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
        }
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._PLAIN:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            kwargs = kwargs | ({} if len(args) > 4 else {"dropout_p": 0.0})
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)


class _CountedBytes(TorchDispatchMode):
    """Counts the bytes of all results: at most as much memory is needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        own = {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(made):
            if isinstance(one, Tensor) and id(one) not in own and not one._is_view():
                self.num_bytes += one.nbytes
        return made


def _is_same(one: float | Tensor, other: float | Tensor) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


@contextmanager
def _kept(dictionaries: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Afterwards dictionaries have the content that they have now, such as no hooks that are registered inside it."""
    before = [(one, dict(one)) for one in dictionaries]
    try:
        yield
    finally:
        for one, content in before:
            if len(one) != len(content) or any(one.get(key) is not value for key, value in content.items()):
                one.clear()
                one.update(content)


@contextmanager
def kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside it the modules have copies of their buffers."""
    with _kept(module._buffers for module in modules):
        for module in modules:
            module._buffers.update({name: one.clone() for name, one in module._buffers.items() if one is not None})
        yield
