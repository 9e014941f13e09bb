"""The bridge: the blocks' own `forward`, replaced on the instances, so that a step meets its recorder at the stack.

    user code    block 0   block 1   block 2   block 3                     stage 0 = {0, 1}
    recorder     run       run       record,   record, suspend with the
                                     hole      cargo, return the output

Stage 0's blocks run where they are called, in the step's thread; the calls of the others are recorded until the last
one suspends the step. What user code does with their outputs in between is an error (`Hole`). Where no block may run in
that thread (`num_local` is 0) the first one suspends the step as well, to be resumed with what it returns.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd.graph_boundary import sequence_number
from lightning_hanayo.runtime.capture.proxy import pattern
from lightning_hanayo.runtime.capture.stage_input import NOTHING, StageInput
from lightning_hanayo.runtime.capture.suspended_call import current_visitor, suspend
from lightning_hanayo.runtime.comm.message import Message
from lightning_hanayo.runtime.comm.pytree import Flattener, Skeleton
from lightning_hanayo.runtime.random_streams import BlockRandomness, RandomStreams

_INNER = "_forward_behind_bridge"
_COMPILED = "_compiled_behind_bridge"
_ELSEWHERE = "_lies_on_another_rank"
_WHOLE = "_runs_where_it_is_called"
_RANDOMNESS = "_random_stream"


class _Compiled:
    """What `block.compile()` has put before the block's call; a copy's is its own affair, as for `nn.Module`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def install(
    blocks: Sequence[nn.Module], streams: RandomStreams | None = None, *, num_local: int = 0, whole: bool = False
) -> None:
    """Replace each block's `forward` by one of ours: a bound method, so that deepcopy and pickle bind it to the copy.

    Args:
        blocks: the stack.
        streams: where the blocks' random numbers come from; None: from torch's own generators as they are.
        num_local: how many of them, the first ones, run where the step calls them.
        whole: whether this rank runs the whole step, so that every block runs where it is called.
    """
    for index, block in enumerate(blocks):
        if _INNER not in vars(block):
            object.__setattr__(block, _INNER, vars(block).get("forward"))
            object.__setattr__(block, _ELSEWHERE, any(parameter.is_meta for parameter in block.parameters()))
            object.__setattr__(block, _WHOLE, whole)
            randomness = None
            if streams is not None:
                randomness = BlockRandomness(streams, index, in_code=whole or index < num_local, repeats=whole)
            object.__setattr__(block, _RANDOMNESS, randomness)
            object.__setattr__(block, "forward", MethodType(forward, block))  # a block may guard its attributes
            if block._compiled_call_impl is not None:
                object.__setattr__(block, _COMPILED, _Compiled(block._compiled_call_impl))
                block._compiled_call_impl = MethodType(forward, block)


def remove(blocks: Sequence[nn.Module]) -> None:
    """Give the blocks their own `forward` back."""
    for block in blocks:
        if _INNER in vars(block):
            inner = vars(block).pop(_INNER)
            for name in ("forward", _ELSEWHERE, _WHOLE, _RANDOMNESS):
                del vars(block)[name]
            if inner is not None:
                object.__setattr__(block, "forward", inner)
            compiled = vars(block).pop(_COMPILED, None)
            if compiled is not None:
                block._compiled_call_impl = compiled.call


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What stands for the block's forward: a step's visitor is asked first. Its name is what pickle looks up."""
    if torch.compiler.is_dynamo_compiling() and (getattr(block, _COMPILED, None) is not None or getattr(block, _WHOLE)):
        return _inner(block, *args, **kwargs)  # reached from `run`, which has asked; or the whole step is compiled
    visitor = None if vars(block)[_WHOLE] else current_visitor()
    if visitor is None:
        return run(block, *args, **kwargs)
    return visitor.visit(block, args, kwargs)


def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The block's own forward.

    Raises:
        UnsupportedError: the block lies on another pipeline rank.
    """
    if vars(block)[_ELSEWHERE]:
        raise UnsupportedError(
            f"a {type(block).__name__} of the pipelined stack was called outside a training or evaluation step, but it "
            f"lies on another pipeline rank; only the steps (training_step, validation_step, ...) see the whole model."
        )
    randomness = _randomness_of(block)
    with nullcontext() if randomness is None else randomness.of_run():
        return _run(block, *args, **kwargs)


def _run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled = vars(block).get(_COMPILED)
    return _inner(block, *args, **kwargs) if compiled is None else compiled.call(*args, **kwargs)


def _randomness_of(block: nn.Module) -> BlockRandomness | None:
    return vars(block).get(_RANDOMNESS)


def _inner(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner = getattr(block, _INNER)
    return inner(*args, **kwargs) if inner is not None else type(block).forward(block, *args, **kwargs)


class BlockTracer:
    """What one step does at the stack: run the first blocks, record the calls of the others, suspend at the last.

    Args:
        blocks: all blocks of the stack, in order.
        num_local: how many of them run where they are called: those of stage 0, or none.
        name: the stack's qualified name, for errors.
    """

    def __init__(self, blocks: Sequence[nn.Module], num_local: int, name: str) -> None:
        self._order = {id(block): i for i, block in enumerate(blocks)}
        self._num_local = num_local
        self._name = name
        self._next = 0
        self.mark = 0
        """autograd's clock at the suspension: older nodes in the loss's graph belong to the code before the stack"""
        self._output: Any = None
        self._flattener = Flattener()
        self._calls: dict[Skeleton, int] = {}
        self._which: list[int] = []

    @property
    def num_visited(self) -> int:
        """How many blocks the step has called."""
        return self._next

    @property
    def packet(self) -> Message:
        """The recorded calls, with the output of the blocks before them, when the step is suspended."""
        carry = NOTHING if self._which else self._flattener.flatten(self._output, "the output of a block")
        return StageInput(carry, tuple(self._calls), tuple(self._which), tuple(self._flattener.tensors)).packet

    def visit(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One block's call by user code; returns its output, or a hole, or the output of the stack.

        Raises:
            UnsupportedError: a second pass, blocks out of order, or an argument that can't cross.
        """
        index = self._order.get(id(block))
        if index is None:  # a copy of the model, an average say, which user code calls in its step
            return run(block, *args, **kwargs)
        if index != self._next:
            raise UnsupportedError(self._disorder(index))
        self._next += 1
        randomness = _randomness_of(block)  # also of a block on another rank: the caller's stream advances everywhere
        with nullcontext() if randomness is None else randomness.of_call():
            return self._answer(block, index, args, kwargs)

    def _answer(self, block: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index < self._num_local:
            output = self._output = _run(block, *args, **kwargs)
        else:
            self._record(index, args, kwargs)
            if index == 0:
                self._output = suspend()
                self._flattener, self._calls, self._which = Flattener(), {}, []
            output = pattern(self._output, index)
        if self._next < len(self._order):
            return output
        self.mark = sequence_number()
        return suspend()

    def _record(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        where = f"{self._name}[{index}]"
        call = (
            "tuple",
            ("tuple", *(self._argument(index, arg, f"argument {i} of {where}") for i, arg in enumerate(args))),
            ("dict", *((("plain", "str", name), self._argument(index, arg, f"argument {name!r} of {where}"))
                       for name, arg in kwargs.items())),
        )  # fmt: skip
        self._which.append(self._calls.setdefault(call, len(self._calls)))

    def _argument(self, index: int, value: Any, what: str) -> Skeleton:
        skeleton = self._flattener.flatten(None if _is_cache(value) else value, what)
        return _relative(skeleton, index, what)

    def _disorder(self, index: int) -> str:
        if self._next == len(self._order):
            return (
                f"{self._name} is passed a second time in one step; a pipeline plays one pass for each micro-batch. "
                f"Call the model once per step, on the concatenated inputs."
            )
        return f"{self._name}[{index}] is called where {self._name}[{self._next}] is next; the stack runs in order."


def _is_cache(value: Any) -> bool:
    """A Hugging Face key/value cache, passed also in training, where it holds nothing that is used again."""
    return any(k.__name__ == "Cache" and k.__module__.startswith("transformers") for k in type(value).__mro__)


def _relative(skeleton: Skeleton, index: int, what: str) -> Skeleton:
    """Holes stand for the output of the block just before; one of an earlier block would be a skip connection."""
    kind, *parts = skeleton
    if kind == "hole":
        if parts[0] != index - 1:
            raise UnsupportedError(f"{what} is the output of block {parts[0]}: a skip connection between blocks.")
        return ("hole", 0, parts[1])
    if kind in ("tuple", "list"):
        return (kind, *(_relative(part, index, what) for part in parts))
    if kind == "dict":
        return ("dict", *((key, _relative(value, index, what)) for key, value in parts))
    return skeleton
