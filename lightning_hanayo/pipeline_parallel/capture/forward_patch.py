"""Replaces the blocks' `forward` on the instances, so that a block called in a step asks that step's tracer first.

A block called outside a step runs as always. Names, parameters, class and repr of a block stay as they are.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import current_tracer
from lightning_hanayo.pipeline_parallel.nan import MadeValues
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams
from lightning_hanayo.pipeline_parallel.trace import block_range, is_profiling

_ORIGINAL = "_hanayo_original_forward"
_PATCH = "_hanayo_patch"


@dataclass(frozen=True, eq=False)
class BlockPatch:
    """What a block's patched `forward` knows. Copies of the block have no streams, notes and compiled call."""

    on_other_rank: bool
    single_stage: bool
    index: int = 0
    streams: RandomStreams = NO_STREAMS
    values: MadeValues = field(default_factory=MadeValues)
    compiled: Callable[..., Any] | None = None
    """the block's call as `block.compile()` has set it"""
    in_compiled: set[int] = field(default_factory=set)
    """the threads that are in it: where Dynamo doesn't compile it, it calls `forward`"""

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockPatch, (self.on_other_rank, self.single_stage)

    def run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call."""
        assert self.compiled is not None
        thread = threading.get_ident()
        self.in_compiled.add(thread)
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.in_compiled.discard(thread)

    @property
    def in_step(self) -> bool:
        """Whether the block runs where the step calls it. Then each call has random numbers of its own."""
        return self.single_stage or self.index < self.streams.num_local

    def stream_of_call(self) -> AbstractContextManager[Any]:
        """The random stream of a call by the step's code, which continues its own stream afterwards."""
        return self.streams.block(self.index, repeats=self.in_step)


def patch_of(block: nn.Module) -> BlockPatch:
    """The patch of a patched block."""
    return vars(block)[_PATCH]  # type: ignore[no-any-return]


def patch_blocks(
    blocks: Sequence[nn.Module],
    streams: RandomStreams = NO_STREAMS,
    *,
    values: MadeValues | None = None,
    single_stage: bool = False,
) -> None:
    """Replace each block's `forward` by a bound method, so that deepcopy and pickle bind it to the copy.

    If the stack is a `single_stage`, all of them run where the step calls them. Their random numbers come from
    `streams`. Their outputs are noted in `values`.
    """
    for index, block in enumerate(blocks):
        if _ORIGINAL not in vars(block):
            compiled = block._compiled_call_impl
            is_elsewhere = any(parameter.is_meta for parameter in block.parameters())
            patch = BlockPatch(is_elsewhere, single_stage, index, streams, values or MadeValues(), compiled)
            own = {_ORIGINAL: vars(block).get("forward"), _PATCH: patch, "forward": MethodType(forward, block)}
            vars(block).update(own)  # a block may guard its attributes
            if compiled is not None:
                block._compiled_call_impl = MethodType(forward, block)


def unpatch_blocks(blocks: Sequence[nn.Module]) -> None:
    """Give the blocks their own `forward` back."""
    for block in blocks:
        if _ORIGINAL in vars(block):
            original, patch = vars(block).pop(_ORIGINAL), vars(block).pop(_PATCH)
            del vars(block)["forward"]
            if original is not None:
                object.__setattr__(block, "forward", original)
            if patch.compiled is not None:
                block._compiled_call_impl = patch.compiled


def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The patched forward: asks the step's tracer, if there is one. Pickle needs the name `forward`."""
    patch: BlockPatch = getattr(block, _PATCH)
    may_be_compiled = patch.compiled is not None or patch.single_stage
    if may_be_compiled and (torch.compiler.is_dynamo_compiling() or threading.get_ident() in patch.in_compiled):
        return _original(block)(*args, **kwargs)  # the tracer has been asked already, or the whole step is compiled
    tracer = None if patch.single_stage else current_tracer()
    if tracer is None:
        return run_block(block, *args, **kwargs)
    return tracer.on_call(block, args, kwargs)


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, with its random numbers.

    Raises:
        UnsupportedError: the block is stored on another pipeline rank.
    """
    patch: BlockPatch = vars(block)[_PATCH]
    if patch.on_other_rank:
        raise UnsupportedError(
            f"a {type(block).__name__} of the pipelined stack was called outside a step, or is a copy, but its weights "
            f"are on another pipeline rank. Steps see the whole model; copy it in __init__ or setup()."
        )
    if patch.in_step:
        with patch.stream_of_call():
            return run_original(block, *args, **kwargs)
    patch.streams.begin_block(patch.index)  # no other stream is continued afterwards
    return run_original(block, *args, **kwargs)


def run_original(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the block's own forward, compiled if `block.compile()` was called."""
    patch: BlockPatch = vars(block)[_PATCH]
    run = _original(block) if patch.compiled is None else patch.run_compiled
    if is_profiling():
        with block_range(block):
            made = run(*args, **kwargs)
    else:
        made = run(*args, **kwargs)
    patch.values.note_call(patch.index, (args, kwargs), made)
    return made


def run_uncompiled(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a patched block's own code, without a tracer, random streams, or notes of its values."""
    inner = block._modules.get("_orig_mod")  # of torch.compile(block)
    return (_original(block) if inner is None else inner)(*args, **kwargs)


def begin_code_before(block: nn.Module) -> None:
    """Start the random stream of the code between the block before this one and this one, on the block's stage."""
    patch: BlockPatch | None = vars(block).get(_PATCH)
    if patch is not None:
        patch.streams.begin_code_before(patch.index)


def _original(block: nn.Module) -> Callable[..., Any]:
    original = getattr(block, _ORIGINAL)
    return partial(type(block).forward, block) if original is None else original
