"""A layer's sharded weight: its all-gather along x for a product, and the reduce-scatter of its gradient.

stored      [N/(y x), K/z]    (or transposed, as a `Conv1D` of Hugging Face stores it)
gathered    [N/y, K/z]        what one rank multiplies with

Parts that don't divide are padded with zeros before the collective. What is stored has no padding.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending
from lightning_hanayo.weight_gradients import WeightGradients

_MAX_PREFETCHED = 2
"""weights that are gathered before their products need them"""

_MAX_PENDING = 2
"""gradients under way: each holds the memory of the whole gradient until its sum has arrived"""


class ShardedWeight:
    """The weight of one layer: its module's parameter `name`, or those `rows` of it that hold this weight.

    Args:
        module: has this rank's shard.
        axis: the ranks that gather the weight.
        shape: of the gathered weight, [N/y, K/z], rounded up.
        pending_gradients: takes gradients whose reduce-scatter is under way while a backward runs.
        queue: takes the gradients that the stage's split backward leaves for later; None: it leaves none.
        transposed: whether the parameter is [K/z, N/(y x)].
    """

    def __init__(
        self,
        module: nn.Module,
        axis: MeshAxis,
        shape: tuple[int, int],
        pending_gradients: "PendingGradients",
        queue: WeightGradients | None = None,
        *,
        transposed: bool = False,
        name: str = "weight",
        rows: slice | None = None,
    ) -> None:
        self._module = module
        self._name = name
        self._rows = rows
        self._axis = axis
        self._shape = shape
        self._transposed = transposed
        self._prefetched: tuple[tuple[int, torch.dtype], Pending] | None = None
        self.pending_gradients = pending_gradients
        self.queue = queue

    def __deepcopy__(self, memo: Any) -> "ShardedWeight":
        twin = copy(self)
        twin._module = memo.get(id(self._module), self._module)  # the copy of the module, which is being made
        twin._prefetched = None
        return twin

    @property
    def parameter(self) -> nn.Parameter:
        """The shard, as the module has it now."""
        parameter = self._module._parameters[self._name]
        assert parameter is not None
        return parameter

    def start_all_gather(self, dtype: torch.dtype) -> Pending:
        """Start to gather the weight in `dtype`, or take the prefetched one. Called by all ranks of x."""
        if self._prefetched is not None and self._prefetched[0] == (self.parameter._version, dtype):
            (_, pending), self._prefetched = self._prefetched, None
            return pending
        self.drop_prefetched()
        return self._start(dtype)

    def prefetch(self, dtype: torch.dtype) -> None:
        """Start to gather the weight for its next product, while another layer computes."""
        if self._prefetched is None and self._axis.size > 1:
            self._prefetched = (self.parameter._version, dtype), self._start(dtype)

    def drop_prefetched(self) -> None:
        """Free a prefetched weight, once its collective has ended."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            prefetched[1].wait()

    def start_reduce_scatter(self, gradient: Tensor) -> Pending:
        """Start to sum [N/y, K/z], which is partial over x. The result is this parameter's gradient."""
        if missing := -self._shape[0] % self._axis.size:
            gradient = pad(gradient, (0, 0, 0, missing))
        pending = self._axis.reduce_scatter(gradient.unflatten(0, (self._axis.size, -1)))
        return Pending(None, lambda: self._as_stored(pending.wait()))

    def _start(self, dtype: torch.dtype) -> Pending:
        stored = self.parameter.detach() if self._rows is None else self.parameter.detach()[self._rows]
        rows = (stored.t() if self._transposed else stored).to(dtype)
        per_rank = -(-self._shape[0] // self._axis.size)
        missing = 0, self._shape[1] - rows.shape[1], 0, per_rank - rows.shape[0]
        pending = self._axis.all_gather(pad(rows, missing) if any(missing) else rows)
        return Pending(None, lambda: pending.wait().flatten(0, 1)[: self._shape[0]])

    def _as_stored(self, gradient: Tensor) -> Tensor:
        stored = self.parameter
        gradient = gradient.t() if self._transposed else gradient
        if self._rows is not None:
            whole = torch.zeros_like(stored)
            whole[self._rows] = gradient[:, : stored.shape[1]]
            return whole
        own = gradient[: stored.shape[0], : stored.shape[1]].to(stored.dtype)
        return own.contiguous() if own.numel() else torch.empty_like(stored)  # with the strides that autograd expects


class PrefetchOrder:
    """The order in which a stage uses its weights, recorded as it runs, so that the next ones can be prefetched.

    forward      block 0: a b     block 1: c d         b is followed by c
    backward     block 1: c d     block 0: a b         blocks that are recomputed: d is followed by a
    """

    def __init__(self) -> None:
        self._forward: dict[ShardedWeight, ShardedWeight] = {}
        self._recomputation: dict[ShardedWeight, ShardedWeight] = {}
        self._following = self._forward
        self._last: ShardedWeight | None = None
        self._prefetched: list[ShardedWeight] = []

    def begin(self, *, recomputes: bool = False) -> None:
        """A stage's forward or backward begins: its first weight doesn't follow the last one of the run before."""
        self._following = self._recomputation if recomputes else self._forward
        self._last = None

    def record(self, weight: ShardedWeight) -> list[ShardedWeight]:
        """Record that `weight` is used now, and return those that followed it last time. Called by all ranks.

        A weight that was prefetched, but is no longer expected, is dropped.
        """
        if self._last is not None:
            self._following[self._last] = weight
        self._last = weight
        expected: list[ShardedWeight] = []
        following = self._following.get(weight)
        while len(expected) < _MAX_PREFETCHED and following is not None:
            expected.append(following)
            following = self._following.get(following)
        for other in self._prefetched:
            if other is not weight and other not in expected:
                other.drop_prefetched()
        self._prefetched = expected
        return list(expected)

    def drop_prefetched(self) -> None:
        """A batch begins: free what was prefetched in the batch before, whose weights may have changed."""
        for weight in self._prefetched:
            weight.drop_prefetched()
        self._prefetched = []


class PendingGradients:
    """Weight gradients whose reduce-scatter over x is under way, while the backward goes on."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, Pending]] = []
        self._has_callback = False

    def add(self, parameter: Tensor, gradient: Pending) -> None:
        """Called inside a backward. At its end the gradient has been added to `parameter.grad`."""
        if not self._has_callback:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)
            self._has_callback = True
        self._pending.append((parameter, gradient))
        while len(self._pending) > _MAX_PENDING:
            self._finish_first()

    def finish(self) -> None:
        """Wait for all, and add them to their parameters' gradients."""
        self._has_callback = False
        while self._pending:
            self._finish_first()

    def discard(self) -> None:
        """Drop all, after a failure."""
        self._pending.clear()
        self._has_callback = False

    def _finish_first(self) -> None:
        parameter, pending = self._pending.pop(0)
        gradient = pending.wait()
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
