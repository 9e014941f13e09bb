"""Replaces the blocks' `forward` on the instances, so that a block called in a step asks that step's tracer first.

A block called outside a step runs as always. Names, parameters, class and repr of a block stay as they are.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import current_tracer
from lightning_hanayo.pipeline_parallel.nan import BlockValues, MadeValues
from lightning_hanayo.pipeline_parallel.profiling.trace import block_range
from lightning_hanayo.pipeline_parallel.rng import BlockRandomness, RandomStreams

_ORIGINAL = "_hanayo_original_forward"
_COMPILED = "_hanayo_compiled_call"
_ON_OTHER_RANK = "_hanayo_on_other_rank"
_SINGLE_STAGE = "_hanayo_single_stage"
_RANDOMNESS = "_hanayo_randomness"
_VALUES = "_hanayo_values"


@dataclass(frozen=True)
class _CompiledCall:
    """The block's call as `block.compile()` has set it. It is not copied or pickled, as in `nn.Module`."""

    call: Callable[..., Any]
    _threads: set[int] = field(default_factory=set)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and know of it meanwhile."""
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            return self.call(*args, **kwargs)
        finally:
            self._threads.discard(thread)

    @property
    def is_running(self) -> bool:
        """Whether this thread is in it: Dynamo calls the block's `forward` where it doesn't compile it, or no more."""
        return threading.get_ident() in self._threads

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def patch_blocks(
    blocks: Sequence[nn.Module],
    streams: RandomStreams | None = None,
    *,
    values: MadeValues | None = None,
    single_stage: bool = False,
) -> None:
    """Replace each block's `forward` by a bound method, so that deepcopy and pickle bind it to the copy.

    If the stack is a `single_stage`, all of them run where the step calls them. Their random numbers come from
    `streams`; None: from torch's own generators as they are. Their outputs are noted in `values`.
    """
    for index, block in enumerate(blocks):
        if _ORIGINAL not in vars(block):
            object.__setattr__(block, _ORIGINAL, vars(block).get("forward"))
            object.__setattr__(block, _ON_OTHER_RANK, any(parameter.is_meta for parameter in block.parameters()))
            object.__setattr__(block, _SINGLE_STAGE, single_stage)
            randomness = None
            if streams is not None:
                randomness = BlockRandomness(streams=streams, index=index, is_single=single_stage)
            object.__setattr__(block, _RANDOMNESS, randomness)
            object.__setattr__(block, _VALUES, None if values is None else BlockValues(values, index))
            object.__setattr__(block, "forward", MethodType(forward, block))  # a block may guard its attributes
            if block._compiled_call_impl is not None:
                object.__setattr__(block, _COMPILED, _CompiledCall(block._compiled_call_impl))
                block._compiled_call_impl = MethodType(forward, block)


def unpatch_blocks(blocks: Sequence[nn.Module]) -> None:
    """Give the blocks their own `forward` back."""
    for block in blocks:
        if _ORIGINAL in vars(block):
            original = vars(block).pop(_ORIGINAL)
            for name in ("forward", _ON_OTHER_RANK, _SINGLE_STAGE, _RANDOMNESS, _VALUES):
                del vars(block)[name]
            if original is not None:
                object.__setattr__(block, "forward", original)
            compiled = vars(block).pop(_COMPILED, None)
            if compiled is not None:
                block._compiled_call_impl = compiled.call


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The patched forward: asks the step's tracer, if there is one. Pickle needs the name `forward`."""
    compiled = getattr(block, _COMPILED, None)
    if torch.compiler.is_dynamo_compiling() and (compiled is not None or getattr(block, _SINGLE_STAGE)):
        return _original(block, *args, **kwargs)  # the tracer has been asked already, or the whole step is compiled
    if compiled is not None and compiled.is_running:
        return _original(block, *args, **kwargs)
    tracer = None if vars(block)[_SINGLE_STAGE] else current_tracer()
    if tracer is None:
        return run_block(block, *args, **kwargs)
    return tracer.on_call(block, args, kwargs)


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, with its random numbers.

    Raises:
        UnsupportedError: the block is stored on another pipeline rank.
    """
    if vars(block)[_ON_OTHER_RANK] and current_tracer() is not None:
        raise UnsupportedError(
            f"the step calls a copy of a {type(block).__name__} of the stack that was made when the block was already "
            f"on another pipeline rank, so the copy has no weights here. Copy the model in __init__ or setup(), where "
            f"it is whole on all ranks; copies run on the rank of the step."
        )
    if vars(block)[_ON_OTHER_RANK]:
        raise UnsupportedError(
            f"a {type(block).__name__} of the pipelined stack was called outside a training or evaluation step, but it "
            f"is stored on another pipeline rank; only the steps (training_step, validation_step, ...) see the whole "
            f"model."
        )
    randomness = randomness_of(block)
    with nullcontext() if randomness is None else randomness.of_run():
        return run_original(block, *args, **kwargs)


def run_original(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, compiled if `block.compile()` was called."""
    compiled = vars(block).get(_COMPILED)
    values: BlockValues | None = vars(block).get(_VALUES)
    with block_range(block):
        made = _original(block, *args, **kwargs) if compiled is None else compiled.run(*args, **kwargs)
    if values is not None:
        values.note((args, kwargs), made)
    return made


def run_uncompiled(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a patched block's own code, without a tracer, random streams, or notes of its values."""
    inner = block._modules.get("_orig_mod")  # of torch.compile(block)
    return _original(block, *args, **kwargs) if inner is None else inner(*args, **kwargs)


def randomness_of(block: nn.Module) -> BlockRandomness | None:
    """The random streams of a patched block."""
    return vars(block).get(_RANDOMNESS)


def begin_code_before(block: nn.Module) -> None:
    """Start the random stream of the code between the block before this one and this one, on the block's stage."""
    randomness = randomness_of(block)
    if randomness is not None:
        randomness.streams.begin_code_before(randomness.index)


def _original(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    original = getattr(block, _ORIGINAL)
    return original(*args, **kwargs) if original is not None else type(block).forward(block, *args, **kwargs)
