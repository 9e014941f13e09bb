"""The collectives that user code calls: over the ranks that see different samples and run the same code.

in a step        the ranks that have samples of the micro-batch: data ranks, and in a cube those with a share
in a hook        the data ranks: the ranks of a cube have the same values there, and so have the pipeline ranks

Ranks agree on each call before any of them issues it (`Agreement`): if one calls something else, or is further already,
it is an error on all of them within seconds, and none waits in vain.

Calls of `torch.distributed` over the whole world are checked, too (`PATCHES`):

    dist.all_reduce(x) in training_step          pipeline rank 0 alone runs it: an error, not a wait without end
    dist.all_reduce(x) in on_train_epoch_end     all ranks run it, also those without data of their own: an error
    dist.all_reduce(x, group=mine)               as always
    dist.barrier() in on_train_epoch_end         as always
"""

import functools
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.pipeline_parallel.object_collectives import broadcast_object
from lightning_hanayo.strategy.failure import Failures, meet
from lightning_hanayo.strategy.groups import AllGather
from lightning_hanayo.strategy.patches import PatchedFunction, PatchedInRuns
from lightning_hanayo.strategy.run import Run

_LOOK = 1.0
"""seconds between two looks at how far the others are"""
WAY_OUT = (
    "All ranks with data must call the same collectives, in the same order, in as many micro-batches: not under a "
    "condition that differs between ranks, and with batches of equal sizes on all data ranks (drop_last=True)"
)


@dataclass(frozen=True)
class Call:
    """A collective that user code calls on one rank."""

    name: str
    """of the function, with options that must be the same"""
    place: str
    """where: the hook, or the step and its micro-batch"""
    shape: Sequence[int] | None = None
    dtype: str = ""
    num_samples: int = 1
    """of the samples that it is about, how many this rank has"""
    weighs: bool = True
    """whether the loss of these samples counts, so that a backward runs for it"""

    def __str__(self) -> str:
        what = "" if self.shape is None else f" of {self.dtype} {list(self.shape)}"
        return f"{self.name}{what} in {self.place}"

    def matches(self, other: "Call") -> bool:
        """Whether it is the same call. The tensor of a rank without samples doesn't matter."""
        alike = not (self.num_samples and other.num_samples) or (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and (self.name, self.place) == (other.name, other.place)


IN_HOOKS = 3
"""compare only the first three numbers of a position in hooks: ranks run different numbers of steps"""


class Agreement:
    """One rank's part in the agreement on a collective, before any rank issues it.

    The ranks meet in the store, not in a collective: one that is never completed could not be left, either.

    Args:
        name: of this series of agreements.
        ranks: those that call.
        failures: tell how far other ranks are, and whether one has failed.
        depth: how many numbers of their positions are the same where they make the same call; None: all.
    """

    def __init__(self, name: str, ranks: Sequence[int], failures: Failures, depth: int | None = None) -> None:
        self._key = f"hanayo/agreement/{failures.run}/{name}/{ranks[0]}"
        self.name = name
        self.ranks = list(ranks)
        self._failures = failures
        self._depth = depth
        self._count = 0

    def on(self, call: Call) -> list[Call]:
        """Return the call of each rank of the group.

        Raises:
            UnsupportedError: another rank calls something else, or nothing.
        """
        if len(self.ranks) == 1:
            return [call]
        calls = self._exchange(call)
        present = next((i for i, one in enumerate(calls) if one.num_samples), 0)
        for rank, other in zip(self.ranks, calls, strict=True):
            if not calls[present].matches(other):
                raise UnsupportedError(
                    f"ranks {self.ranks[present]} and {rank} call different collectives: {calls[present]}, and "
                    f"{other}. {WAY_OUT}."
                )
        return calls

    def _exchange(self, call: Call) -> list[Call]:
        deadline, ahead = time.monotonic() + _LOOK, None

        def look() -> None:
            """Wait as long as no rank of the group is further than this one."""
            nonlocal deadline, ahead
            if time.monotonic() > deadline:
                earlier, ahead = ahead, self._rank_ahead()
                if ahead is not None and ahead == earlier:
                    raise UnsupportedError(f"rank {ahead} has not called {call}, for which others wait. {WAY_OUT}.")
                deadline = time.monotonic() + _LOOK

        self._count += 1
        own = asdict(call)
        calls = meet(self._failures, f"{self._key}/{self._count}", self.ranks, own, Waiting(call, self), look)
        for name in (self._failures.rank, "arrived", "all"):  # all have read those: they are here now
            self._failures.store.delete_key(f"{self._key}/{self._count - 1}/{name}")
        return [Call(**one) for one in calls]

    def _rank_ahead(self) -> int | None:
        """A rank that has passed this point of the run.

        Raises:
            PeerFailed: a rank has failed.
        """
        self._failures.check_peers()
        own = self._failures.position[: self._depth]
        positions = self._failures.positions()
        return next((rank for rank in self.ranks if positions.get(rank, ())[: self._depth] > own), None)


@dataclass(frozen=True)
class RunningStep:
    """The step that runs: of which micro-batch, and with how many samples (0: a padding sample)."""

    name: str
    microbatch: int
    num_microbatches: int
    num_samples: int
    weighs: bool

    def __str__(self) -> str:
        return f"{self.name}, micro-batch {self.microbatch} of {self.num_microbatches}"


class UserCollectives:
    """The collectives of one rank, in one run."""

    def __init__(self, run: Run) -> None:
        self._run, self._guard = run, run.guard
        self._cube_size = prod(run.topology.cube)
        """how many ranks share a micro-batch"""

        def agreement(name: str, group: dist.ProcessGroup | None, depth: int | None) -> Agreement:
            ranks = [run.rank] if group is None else dist.get_process_group_ranks(group)
            return Agreement(name, ranks, run.failures, depth)

        self._in_steps = agreement("steps", run.groups.metrics, None)
        self._in_hooks = agreement("hooks", run.groups.data, IN_HOOKS)
        self._world = Agreement("world", range(run.topology.world_size), run.failures, IN_HOOKS)
        self._step: RunningStep | None = None
        self._has_warned = False
        self.used: set[int] = set()
        """the micro-batches of this batch whose steps have called a collective"""

    @property
    def is_user_code(self) -> bool:
        """Whether user code runs, and not Lightning or this package."""
        return self._guard.scope != "off"

    def begin_batch(self) -> None:
        """Called before each batch."""
        self.used.clear()

    def enter(self, step: RunningStep | None) -> None:
        """Called before user code of a step runs; None: in a dry run."""
        self._step = step

    def all_gather(self, tensor: Tensor, *, sync_grads: bool) -> Tensor:
        """[...] of each rank to [ranks, ...], in the order of their samples. With a gradient if `sync_grads`."""
        calls = self.agree("self.all_gather" + ("(sync_grads=True)" if sync_grads else ""), tensor)
        group = self._group
        present = [i for i, call in enumerate(calls) if call.num_samples]
        if sync_grads:
            self._check_gradients(calls)
        if group is None:
            return (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        if not calls[group.rank()].num_samples:
            tensor = tensor.new_zeros(calls[present[0]].shape or ())
        agreement, place = self._agreement, self.place  # as they are now: the backward may run elsewhere

        def agree() -> None:
            agreement.on(Call("the backward of self.all_gather(sync_grads=True)", place))

        with nullcontext() if sync_grads else torch.no_grad():
            gathered: Tensor = AllGather.apply(tensor, group, agree)
        return gathered if len(present) == len(calls) else gathered[present]

    def reduce(self, tensor: Any, op: Any) -> Any:
        """One value of all ranks' tensors: "mean", "sum", "max" ..., or torch's ReduceOp."""
        if not isinstance(tensor, Tensor):
            return tensor
        rows = self.all_gather(tensor, sync_grads=False)
        name = (op if isinstance(op, str) else str(op).rpartition(".")[2]).lower()
        if name not in _REDUCTIONS:
            raise UnsupportedError(f"strategy.reduce(reduce_op={op!r}): expected {', '.join(_REDUCTIONS)}")
        rows = rows.double() if _REDUCTIONS[name] == "mean" and not rows.is_floating_point() else rows
        return getattr(rows, _REDUCTIONS[name])(0).to(tensor.dtype)

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank `source` of the world. In hooks that run on all ranks, over all of them."""
        if self.runs_on_all_ranks:
            return broadcast_object(value, source=source)
        self.agree(f"strategy.broadcast(src={source})")
        group = self._group
        if group is None:
            return value
        if source not in dist.get_process_group_ranks(group):
            raise UnsupportedError(
                f"strategy.broadcast(src={source}) in {self.place}: rank {source} doesn't run it. Use src=0."
            )
        return broadcast_object(value, group, dist.get_group_rank(group, source))

    def barrier(self) -> None:
        """Wait for all ranks that run this code."""
        if self.runs_on_all_ranks:
            call = self._call("strategy.barrier", None)
            with self.unchecked():
                self._world.on(call)
        else:
            self.agree("strategy.barrier")

    def decide(self, decision: bool, *, of_all: bool) -> bool:
        """Whether all ranks (or any) decide so."""
        votes = self.reduce(torch.tensor(int(decision)), "min" if of_all else "max")
        return bool(votes)

    def agree(self, name: str, tensor: Tensor | None = None) -> list[Call]:
        """Agree that all ranks call this now; return their calls.

        Raises:
            UnsupportedError: they don't, or the ranks of a cube have shares of different sizes.
        """
        calls = self._agreement.on(self._call(name, tensor))
        for start in range(0, len(calls), self._cube_size if self._in_step else 1):
            shares = [call.num_samples for call in calls[start : start + self._cube_size] if call.num_samples]
            if self._in_step and tensor is not None and len(set(shares)) > 1:
                raise UnsupportedError(
                    f"{name} in {self.place}: the ranks of the cube have {shares} of its samples, so their mean isn't "
                    "that of samples. Choose sizes with equal shares, or cube_outside='replicate'."
                )
        return calls

    def check_world(self, name: str, tensor: Any) -> None:
        """Check a call of `torch.distributed` over the whole world.

        Raises:
            UnsupportedError: not all ranks call it, or some have no data of their own.
        """
        topology = self._run.topology
        if not self.is_user_code or topology.world_size == 1:
            return
        why, size = "", topology.replica_size
        if self.runs_on_all_ranks:
            if name in _REDUCING and size > 1:
                why = f": of {size} ranks each, only one has data of its own, so that sums would count it several times"
        elif topology.pipe > 1:
            why = ", which runs on pipeline rank 0 alone: the other ranks would never call it"
        elif self._cube_size > 1:
            why = ": the ranks of a cube may have no samples of a micro-batch, and don't count then"
        else:
            self.agree(f"torch.distributed.{name}", tensor)
        if why:
            raise UnsupportedError(f"torch.distributed.{name} over all ranks in {self.place}{why}. {_WAY_OUT}.")

    @property
    def runs_on_all_ranks(self) -> bool:
        """Whether the user code that runs is a hook that runs on the pipeline ranks without data, too."""
        return self._guard.scope == "hook"

    @property
    def place(self) -> str:
        """Where user code is: a hook, or a step and its micro-batch."""
        return str(self._step) if self._in_step else self._guard.hook_name

    def unchecked(self) -> AbstractContextManager[None]:
        """Entered while library code runs that user code has called."""
        return self._guard.off()

    @property
    def _in_step(self) -> bool:
        return self._guard.hook_name == ""

    @property
    def _agreement(self) -> Agreement:
        return self._in_steps if self._in_step else self._in_hooks

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that agree, if there are several. Not kept: it would outlive a failure."""
        group = self._run.groups.metrics if self._in_step else self._run.groups.data
        return None if group is None or group.size() == 1 else group

    def _call(self, name: str, tensor: Tensor | None) -> Call:
        call = Call(name, self.place)
        if tensor is not None:
            call = replace(call, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        if not self._in_step:
            return call
        if self._step is None:  # a dry run
            raise UnsupportedError(
                f"{name} in code before the stack that also runs as a dry run on other samples. Call it after the "
                "blocks, set step='microbatch', or pass masks for all samples or none."
            )
        self.used.add(self._step.microbatch)
        self._warn(name, tensor)
        return replace(call, num_samples=self._step.num_samples, weighs=self._step.weighs)

    def _warn(self, name: str, tensor: Tensor | None) -> None:
        step = self._step
        assert step is not None
        is_cut = tensor is not None and tensor.ndim > 0 and step.num_microbatches > 1
        if is_cut and step.name == "training_step" and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{name} in training_step gathers one of the {step.num_microbatches} micro-batches of each rank's "
                f"batch. A loss over pairs of samples depends on num_microbatches, as with accumulate_grad_batches.",
                stacklevel=2,
            )

    def _check_gradients(self, calls: list[Call]) -> None:
        if any(not call.num_samples or not call.weighs for call in calls) and len(calls) > 1:
            raise UnsupportedError(
                f"self.all_gather(sync_grads=True) in {self.place}: a rank has no samples of this micro-batch that "
                "count: it runs no backward. Choose multiples of num_microbatches times the cube's ranks."
            )


_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "amax", "min": "amin", "product": "prod"}
"""methods of tensors, by the names of the operations"""


_REDUCING = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "gather_object", "all_to_all", "all_to_all_single",
)  # fmt: skip
"""collectives whose result depends on how many ranks take part"""
_OTHERS = (
    "barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "send",
    "recv", "isend", "irecv",
)  # fmt: skip
_WAY_OUT = (
    "Call self.all_gather, self.trainer.strategy.reduce, broadcast or barrier, which know the ranks with data; or "
    "log with self.log(..., sync_dist=True)"
)


@contextmanager
def world_size_watched(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Inside it, `note` gets the frame of each caller of `torch.distributed.get_world_size()`."""

    def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if {*args, *kwargs.values()} <= {None, dist.group.WORLD}:
            note(sys._getframe(2))  # behind this function and the replaced code
        return original(*args, **kwargs)

    with PatchedFunction(distributed_c10d.get_world_size, noted):
        yield


def _checked(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Takes the place of one of the functions."""
    for collectives in PATCHES.running if distributed_c10d.is_initialized() else ():
        bound = _signature(original).bind(*args, **kwargs).arguments
        if bound.get("group") in (None, dist.group.WORLD):
            collectives.check_world(name, next((one for one in bound.values() if isinstance(one, Tensor)), None))
            with collectives.unchecked():  # the functions call each other
                return original(*args, **kwargs)
    return original(*args, **kwargs)


_signature = functools.cache(inspect.signature)


def _patched() -> dict[str, PatchedFunction]:
    functions = {name: getattr(distributed_c10d, name) for name in (*_REDUCING, *_OTHERS)}
    possible = {name: one for name, one in functions.items() if PatchedFunction.is_possible(one)}
    return {name: PatchedFunction(one, partial(_checked, name)) for name, one in possible.items()}


PATCHES: PatchedInRuns[UserCollectives] = PatchedInRuns(_patched)
"""check the calls of user code"""
