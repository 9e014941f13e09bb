"""The collectives that user code calls: over the ranks that see different samples and run the same code.

in a step        the ranks that have samples of the micro-batch: data ranks, and in a cube those with a share
in a hook        the data ranks: the ranks of a cube have the same values there, and so have the pipeline ranks
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.parameter_guard import ParameterGuard
from lightning_hanayo.runtime.comm.object_collectives import broadcast_object
from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.process_groups import AllGather, ProcessGroups
from lightning_hanayo.strategy.user_code.agreement import IN_HOOKS, Agreement, Call


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


@dataclass
class Peers:
    """The ranks that call a collective together: `group` carries the values. None for a rank alone."""

    group: dist.ProcessGroup | None = None
    agreement: Agreement | None = None

    def agree(self, call: Call) -> list[Call]:
        """The call of each rank."""
        return [call] if self.agreement is None else self.agreement.on(call)

    def forget(self) -> None:
        """Drop the process group, after a failure: a traceback may keep this object."""
        self.group = None


def connect_collectives(
    guard: ParameterGuard, groups: ProcessGroups, failures: Failures, world_size: int, *, cube_size: int
) -> "UserCollectives":
    """The collectives of a run. `cube_size`: how many ranks of a cube share a micro-batch."""

    def peers(name: str, group: dist.ProcessGroup | None, depth: int | None) -> Peers:
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        return Peers(group, Agreement(name, ranks, failures, depth)) if len(ranks) > 1 else Peers()

    return UserCollectives(
        guard,
        peers("steps", groups.metrics, None),
        peers("hooks", groups.data, IN_HOOKS),
        Agreement("world", range(world_size), failures, IN_HOOKS),
        cube_size=cube_size,
    )


class UserCollectives:
    """The collectives of one rank.

    Args:
        guard: knows which kind of user code runs.
        in_steps: the ranks that see different samples of a batch.
        in_hooks: the data ranks.
        world: all ranks.
        cube_size: how many ranks of `in_steps` share a micro-batch.
    """

    def __init__(
        self, guard: ParameterGuard, in_steps: Peers, in_hooks: Peers, world: Agreement, *, cube_size: int
    ) -> None:
        self._guard = guard
        self._in_steps = in_steps
        self._in_hooks = in_hooks
        self._world = world
        self._cube_size = cube_size
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
        group = self._peers.group
        present = [i for i, call in enumerate(calls) if call.num_samples]
        if sync_grads:
            self._check_gradients(calls)
        if group is None:
            return (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        if not calls[group.rank()].num_samples:
            tensor = tensor.new_zeros(calls[present[0]].shape or ())
        with nullcontext() if sync_grads else torch.no_grad():
            gathered: Tensor = AllGather.apply(tensor, group, self._before_backward())
        return gathered if len(present) == len(calls) else gathered[present]

    def reduce(self, tensor: Any, op: Any) -> Any:
        """One value of all ranks' tensors: "mean", "sum", "max" ..., or torch's ReduceOp."""
        if not isinstance(tensor, Tensor):
            return tensor
        rows = self.all_gather(tensor, sync_grads=False)
        name = (op if isinstance(op, str) else str(op).rpartition(".")[2]).lower()
        if name in ("mean", "avg"):
            return (rows if rows.is_floating_point() else rows.double()).mean(0).to(tensor.dtype)
        if name not in _REDUCTIONS:
            raise UnsupportedError(f"strategy.reduce(reduce_op={op!r}): expected mean, {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[name](rows)

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of rank `source` of the world. In hooks that run on all ranks, over all of them."""
        if self.runs_on_all_ranks:
            return broadcast_object(value, source=source)
        self.agree(f"strategy.broadcast(src={source})")
        group = self._peers.group
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
        calls = self._peers.agree(self._call(name, tensor))
        for start in range(0, len(calls), self._cube_size if self._in_step else 1):
            shares = [call.num_samples for call in calls[start : start + self._cube_size] if call.num_samples]
            if self._in_step and tensor is not None and len(set(shares)) > 1:
                raise UnsupportedError(
                    f"{name} in {self.place}: the ranks of the cube have {shares} of its samples, so that a mean over "
                    f"ranks would not be the mean over samples. Choose batch sizes and num_microbatches so that the "
                    f"ranks' shares are equal, or set HanayoStrategy(cube_outside='replicate')."
                )
        return calls

    def forget(self) -> None:
        """Drop the process groups, after a failure."""
        self._in_steps.forget()
        self._in_hooks.forget()

    @property
    def runs_on_all_ranks(self) -> bool:
        """Whether the user code that runs is a hook that runs on the pipeline ranks without data, too."""
        return self._guard.scope == "hook"

    @property
    def place(self) -> str:
        """Where user code is: a hook, or a step and its micro-batch."""
        return str(self._step) if self._in_step else self._guard.hook_name

    def unchecked(self) -> AbstractContextManager[None]:
        """Entered while code runs that user code has called, and that knows what it does."""
        return self._guard.off()

    @property
    def _in_step(self) -> bool:
        return self._guard.hook_name == ""

    @property
    def _peers(self) -> Peers:
        return self._in_steps if self._in_step else self._in_hooks

    def _call(self, name: str, tensor: Tensor | None) -> Call:
        call = Call(name, self.place)
        if tensor is not None:
            call = replace(call, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        if not self._in_step:
            return call
        if self._step is None:
            _refuse_dry_run(name)
        self.used.add(self._step.microbatch)
        self._warn(name, tensor)
        return replace(call, num_samples=self._step.num_samples, weighs=self._step.weighs)

    def _warn(self, name: str, tensor: Tensor | None) -> None:
        step = self._step
        assert step is not None
        if tensor is None or not tensor.ndim or step.num_microbatches == 1 or self._has_warned:
            return
        if step.name != "training_step":
            return
        self._has_warned = True
        warnings.warn(
            f"{name} in training_step gathers one of the {step.num_microbatches} micro-batches of each rank's batch. A "
            f"loss over pairs of samples depends on num_microbatches, as with accumulate_grad_batches.",
            stacklevel=2,
        )

    def _check_gradients(self, calls: list[Call]) -> None:
        if any(not call.num_samples or not call.weighs for call in calls) and len(calls) > 1:
            raise UnsupportedError(
                f"self.all_gather(sync_grads=True) in {self.place}: a rank has no samples of this micro-batch that "
                f"count in the loss, so it runs no backward in which it could send gradients. Choose larger "
                f"micro-batches: batch sizes that are multiples of num_microbatches times the ranks of the cube."
            )

    def _before_backward(self) -> Callable[[], object]:
        peers, place = self._peers, self.place

        def agree() -> None:
            peers.agree(Call("the backward of self.all_gather(sync_grads=True)", place))

        return agree


def _refuse_dry_run(name: str) -> NoReturn:
    raise UnsupportedError(
        f"{name} in a step that gives blocks a mask for some samples and none for others, so that the code before the "
        f"stack runs once more, for all samples of each rank's blocks. Pass masks always, call it after the blocks, or "
        f"set HanayoStrategy(cube_outside='replicate')."
    )


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
}
