"""A dry run of the user's step on some samples, on pipeline rank 0 alone: the first block stands in for the stack.

    step    embedding of some samples |suspended               | loss
    here                               block 0, its output  ->   for the whole stack

Nothing remains of it but what it has shown: buffers, attributes, logs, metrics and random numbers are as before.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hanayo.pipeline_parallel import pytree
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.message import Message

Given = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""What the step is to get from the stack, by the number of the tensor, and the first block's output."""


@dataclass
class StandIn:
    """Takes the place of the stack in a dry run."""

    blocks: Sequence[nn.Module]
    given: Given
    calls: list[Message] = field(default_factory=list)
    """of the blocks: for each pass the first one's, and the others'"""
    tensors: list[Tensor] = field(default_factory=list)
    """that the step has got, of all passes: leaves, if they have gradients"""
    output: Any = None
    _made: tuple[pytree.Skeleton, list[Tensor]] = (pytree.NONE, [])
    _has_gradients: bool = True

    def first(self, call: Message, *, has_gradients: bool) -> Any:
        """Run the first block. What it changes in its arguments, it changes in copies."""
        self.calls.append(call)
        self._has_gradients = has_gradients
        copies = Message(call.skeleton, tuple([tensor.detach().clone() for tensor in call.tensors]))
        with torch.no_grad():
            made = StageInput.from_message(copies).run(self.blocks[:1], is_last=len(self.blocks) == 1)
        flattener = pytree.Flattener()
        self._made = flattener.flatten(made.output, "the output of a block"), flattener.tensors
        return made.output

    def others(self, calls: Message) -> None:
        """Make the output of the stack."""
        self.calls.append(calls)
        skeleton, made = self._made
        given = [one.detach().clone() for one in self.given(len(self.tensors), made)]
        for one in given:
            one.requires_grad_(self._has_gradients and one.is_floating_point())
        self.tensors += given
        self.output = pytree.unflatten(skeleton, given)


@dataclass
class Ran:
    """What a dry run has shown."""

    result: Any
    calls: list[Message]
    tensors: list[Tensor]
    """that the step has got from the stack"""
    num_bytes: int
    """of all tensors that it has made outside the stack"""


class DrySteps:
    """Runs dry steps.

    Args:
        user: runs steps, in which no block runs.
        outside: the modules outside the stack, whose buffers are as before afterwards.
    """

    def __init__(self, user: UserStep, outside: Sequence[nn.Module]) -> None:
        self._user = user
        self._modules = [*outside, *user.blocks[0].modules()]

    def run(self, step: Callable[[Any], Any], samples: Any, given: Given = lambda _, made: made) -> Ran:
        """Run the step on some samples, which it may change, without dropout.

        `given`: makes what the step gets from the stack; else that is the first block's output.
        """
        counted, stand_in = _CountedBytes(), StandIn(self._user.blocks, given)

        def run(_: int) -> Any:
            with _WithoutDropout(), counted:
                return step(samples)

        batch = Batch(dry_run_step=run, is_whole=True, loss_weights=[1.0])
        with warnings.catch_warnings(), kept_buffers(self._modules), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")  # of few samples, say: real steps warn, too
            result = self._user.dry_run(batch, stand_in)
        return Ran(result, stand_in.calls, stand_in.tensors, counted.num_bytes)

    @contextmanager
    def running(self) -> Iterator[None]:
        """To be open while dry steps run, outside of batches."""
        self._user.begin_batch()
        streams = self._user.streams
        with ExitStack() as stack:
            if streams is not None:
                stack.enter_context(streams.batch("dry runs"))
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


@contextmanager
def kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside it the modules have copies of their buffers."""
    before = [(module, dict(module._buffers)) for module in modules if module._buffers]
    for module, buffers in before:
        module._buffers.update({name: one.clone() for name, one in buffers.items() if one is not None})
    try:
        yield
    finally:
        for module, buffers in before:
            module._buffers.clear()
            module._buffers.update(buffers)
