"""Whole tensors of parameters, for user code, and the way of their gradients back to the ranks that hold the parameter.

    rank 0   on_train_batch_start     training_step              the batch's end
             w = full_parameter(p)    loss += w.square().sum()   w.grad, summed over the cube --+
    rank 2   w = full_parameter(p)    -                          p.grad += its part of it  <----+

User code issues no collective in its backward: a whole tensor is a leaf, whose gradient is sent at the batch's end.
"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.strategy.groups import broadcast_bytes
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.weight_gradients import gradient_dtype


@dataclass(frozen=True)
class _Leaf:
    """A whole tensor that the batch's steps may use. `is_everywhere`: whether all pipeline ranks know of it."""

    parameter: nn.Parameter
    whole: Tensor
    is_everywhere: bool


@dataclass(eq=False, repr=False)
class FullParameters:
    """Gathers parameters for user code of one run."""

    run: Run
    """of the Trainer"""
    parameters: InitVar[Mapping[str, nn.Parameter]]
    """all of the model, by qualified name"""
    owners: Mapping[str, int]
    """the pipeline rank of each"""
    cube: Cube | None
    """None without one"""

    def __post_init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._leaves: dict[Tensor, _Leaf] = {}
        self._batch = 0

    def get(self, parameter: Tensor) -> Tensor:
        """The whole of `parameter`. See `HanayoStrategy.full_parameter`."""
        if parameter not in self._names:
            raise HanayoError(
                f"full_parameter takes a parameter of the LightningModule, such as those of self.parameters(); got "
                f"{type(parameter).__name__}"
            )
        assert isinstance(parameter, nn.Parameter)
        guard = self.run.guard
        scope, hook = guard.scope, guard.hook_name
        if scope in ("step", "alone") and isinstance(parameter, Placeholder):
            name = self._names[parameter]
            raise UnsupportedError(
                f"full_parameter was called in {hook or 'a step'} for {name}, which is on pipeline rank "
                f"{self.owners[name]}. Call it in a hook that runs on all ranks: for steps in on_train_batch_start."
            )
        with guard.off():
            if scope == "step":
                return self._in_step(parameter)
            if scope == "alone":
                return self._gathered(parameter)
            return self._in_hook(parameter, keeps_gradient=hook == "on_train_batch_start")

    def end_batch(self, *, reduce: bool) -> None:
        """Add the gradients of whole tensors to those of the parameters, where they are. Called by all ranks.

        `reduce` says whether the gradients are summed over the data ranks in this batch.
        """
        leaves, self._leaves = list(self._leaves.values()), {}
        self._batch += 1
        if leaves and torch.is_grad_enabled():
            used = self._used(leaves, reduce=reduce)
            for leaf, is_used in zip(leaves, used, strict=True):
                if is_used:
                    self._add(leaf, reduce=reduce)
                leaf.whole.grad = None  # user code may keep the leaf

    def forget(self) -> None:
        """Drop all whole tensors, after a failure."""
        self._leaves = {}

    # whole tensors

    def _in_step(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._leaves:
            return self._leaves[parameter].whole
        if self.cube is None or parameter not in self.cube.parts_in_steps:
            return parameter
        return self._new_leaf(parameter, self._gathered(parameter), is_everywhere=False)

    def _in_hook(self, parameter: nn.Parameter, *, keeps_gradient: bool) -> Tensor:
        is_missing, owner = self.run.topology.pipe > 1, self.owners[self._names[parameter]]
        if keeps_gradient and not is_missing and self.cube is None:
            return parameter
        is_here = owner == self.run.pipe_rank
        whole = self._gathered(parameter) if is_here else torch.empty_like(parameter, device="cpu")
        if is_missing:
            whole = whole.cpu().contiguous()
            broadcast_bytes(whole, self.run.groups.control, owner)
            whole = whole.to(self.run.device)
        return self._new_leaf(parameter, whole, is_everywhere=True) if keeps_gradient else whole

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a parameter of this pipeline rank, in memory of its own."""
        whole, cube = parameter.detach(), self.cube
        if cube is not None and not cube.outside.is_whole(parameter):
            whole = cube.unshard(whole, parameter)
        return whole.to(parameter.device, copy=True)

    def _new_leaf(self, parameter: nn.Parameter, whole: Tensor, *, is_everywhere: bool) -> Tensor:
        self._leaves[parameter] = _Leaf(parameter, whole, is_everywhere)
        if parameter.requires_grad and torch.is_grad_enabled():
            whole.grad_dtype = gradient_dtype(parameter)
            whole.requires_grad_().register_hook(partial(self._check_is_new, self._names[parameter], self._batch))
        return whole

    def _check_is_new(self, name: str, batch: int, _: Tensor) -> None:
        if batch != self._batch:
            raise UnsupportedError(
                f"the loss uses what full_parameter returned for {name} in an earlier batch, whose values are old and "
                f"whose gradient would be lost. Call it again in each on_train_batch_start."
            )

    # gradients

    def _used(self, leaves: list[_Leaf], *, reduce: bool) -> list[bool]:
        """Which leaves have a gradient, on any rank whose gradients are summed."""
        own = [int(leaf.whole.grad is not None) for leaf in leaves]
        run = self.run
        if run.pipe_rank == 0 and self.cube is not None:
            own = self.cube.mesh.largest(own)
        counts = torch.tensor(own)
        everywhere = torch.tensor([leaf.is_everywhere for leaf in leaves])
        if run.topology.pipe > 1 and everywhere.any():
            known = counts[everywhere]
            dist.broadcast(known, group=run.groups.control, group_src=0)
            counts[everywhere] = known
        if reduce and run.groups.data_control is not None:
            dist.all_reduce(counts, group=run.groups.data_control)
        return [bool(count) for count in counts.tolist()]

    def _add(self, leaf: _Leaf, *, reduce: bool) -> None:
        owner, rank = self.owners[self._names[leaf.parameter]], self.run.pipe_rank
        if rank not in (0, owner):
            return
        gradient = leaf.whole.grad
        if gradient is None:
            gradient = torch.zeros_like(leaf.whole, dtype=gradient_dtype(leaf.parameter))
        if rank == 0 and self.cube is not None:
            gradient = self.cube.mesh.axis("xyz").all_reduce(gradient.contiguous()).wait()
        if owner != 0:
            gradient = self._send_to(owner, gradient)
        if rank == owner:
            self._accumulate(leaf.parameter, gradient, reduce=reduce)

    def _send_to(self, owner: int, gradient: Tensor) -> Tensor:
        control, sent = self.run.groups.control, gradient.detach().cpu().contiguous()
        as_bytes: Any = sent.view(-1).view(torch.uint8)
        if self.run.pipe_rank == 0:
            dist.send(as_bytes, group=control, group_dst=owner)
        else:
            dist.recv(as_bytes, group=control, group_src=0)
        return sent.to(gradient.device)

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor, *, reduce: bool) -> None:
        part, data = gradient if self.cube is None else self.cube.shard(gradient, parameter), self.run.groups.data
        if reduce and data is not None:
            dist.all_reduce(part, group=data)
        if not reduce and self.cube is not None and not self.cube.adds_whole_gradient(parameter):
            return  # a later batch sums the ranks' gradients of this parameter, so one of them adds it
        parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)
