"""Ranges in the traces of torch's profiler: which stage works on which micro-batch, and which block runs."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.autograd import profiler

from lightning_hanayo.schedule import Action

RANGE = "_hanayo_range"
"""the attribute of a block with the name that a profiler of the user's has given it"""


def is_profiling() -> bool:
    """Whether torch's profiler is on; `torch.autograd._profiler_enabled` is false if it records all threads."""
    return profiler._is_profiler_enabled


def action_range(action: Action) -> AbstractContextManager[object]:
    """While torch's profiler is on, a range such as "F stage 3 micro-batch 2"; otherwise nothing."""
    if not is_profiling():
        return nullcontext()
    return profiler.record_function(f"{action.kind} stage {action.stage} micro-batch {action.microbatch}")


def block_range(block: nn.Module) -> AbstractContextManager[object]:
    """While torch's profiler is on, a range with the block's name, if it has one."""
    if not is_profiling() or RANGE not in vars(block):
        return nullcontext()
    return profiler.record_function(vars(block)[RANGE])
