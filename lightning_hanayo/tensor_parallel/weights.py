"""A layer's sharded weight: its all-gather along x for a product, and the reduce-scatter of its gradient.

stored      [N/(y x), K/z]    (or transposed, as a `Conv1D` of Hugging Face stores it)
gathered    [N/y, K/z]        the matrix of one rank's product

Parts that don't divide are padded with zeros before the collective. The stored shard has no padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor_parallel.mesh import MeshAxis, Pending
from lightning_hanayo.weight_gradients import WeightGradients, gradient_dtype

_MAX_PREFETCHED = 2
"""weights that are gathered before their products need them"""

_MAX_PENDING = 2
"""gradients under way: each holds the memory of the whole gradient until its sum has arrived"""


@dataclass(eq=False)
class StoredWeight:
    """This rank's shard of one weight: its module's parameter `name`, or those `rows` of it that hold this weight.

    Args:
        module: has the shard.
        shape: of the gathered weight, [N/y, K/z], rounded up.
        transposed: whether the parameter is [K/z, N/(y x)].
        name: the parameter's.
        rows: of the parameter; None: all.
    """

    module: nn.Module
    shape: tuple[int, int]
    transposed: bool = False
    name: str = "weight"
    rows: slice | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, as the module has it now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    def to_send(self, dtype: torch.dtype, num_ranks: int) -> Tensor:
        """The shard as [rows, K/z], with as many rows as the shard of each of `num_ranks` has."""
        stored = self.parameter.detach()
        stored = stored if self.rows is None else stored[self.rows]
        stored = stored.t() if self.transposed else stored
        stored = stored.to(dtype)
        rows, columns = -(-self.shape[0] // num_ranks), self.shape[1]
        if stored.shape == (rows, columns):
            return stored
        return pad(stored, (0, columns - stored.shape[1], 0, rows - stored.shape[0]))

    def to_add_up(self, gradient: Tensor) -> Tensor:
        """A gradient in the dtype in which ranks add it up: its own, unless `.grad` is in fp32 for a weight in bf16."""
        dtype = gradient_dtype(self.parameter)
        return gradient if dtype is self.parameter.dtype else gradient.to(dtype)

    def as_stored(self, gradient: Tensor) -> Tensor:
        """This rank's rows of a gradient as the parameter's `.grad`: without padding, in its dtype and strides."""
        stored = self.parameter
        if self.transposed:
            gradient = gradient.t()
        if gradient.shape != stored.shape:
            gradient = gradient[: stored.shape[0], : stored.shape[1]]
        dtype = gradient_dtype(stored)
        gradient = gradient.to(dtype)
        return gradient.contiguous() if gradient.numel() else torch.empty_like(stored, dtype=dtype)


@dataclass(eq=False)
class ShardedWeight:
    """The weight of one layer, or the weights of several layers that read one input: one collective for all.

    gathered    [x, N/(y x)] for each part, one after the other: one matrix for one product with all of them
                a matrix for each part, where nothing is gathered, or parts are padded
    """

    parts: Sequence[StoredWeight]
    """this rank's shard of each"""
    axis: MeshAxis
    """the ranks that gather the weight"""
    stage: StageWeights
    """keeps gathered weights, and takes gradients"""

    def __post_init__(self) -> None:
        self.sizes = [part.shape[0] for part in self.parts]
        """the out-features of each part, once it is gathered"""
        divides = not any(size % self.axis.size for size in self.sizes)
        self.is_one_matrix = len(self.parts) == 1 or (self.axis.size > 1 and divides)
        """whether the gathered parts are the rows of one matrix"""

    def __deepcopy__(self, memo: Any) -> ShardedWeight:
        twin = memo[id(self)] = copy(self)
        twin.parts = deepcopy(self.parts, memo)  # of the modules' copies
        return twin

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that hold the parts, each once."""
        return list(dict.fromkeys(part.parameter for part in self.parts))

    def trained(self, is_used: Sequence[bool]) -> list[bool]:
        """Whether each parameter gets a gradient, where the outputs of these parts have one."""
        used = {part.parameter for part, one in zip(self.parts, is_used, strict=True) if one}
        return [parameter.requires_grad and parameter in used for parameter in self.parameters]

    @property
    def is_gathered(self) -> bool:
        """Whether the matrices are gathered from several ranks, so that they have memory of their own."""
        return self.axis.size > 1

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the parameters: others after each change."""
        return tuple(part.parameter._version for part in self.parts)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which the gradients of several micro-batches are added up: that of the parameters' `.grad`."""
        return reduce(torch.promote_types, [gradient_dtype(part.parameter) for part in self.parts])

    def split(self, ys: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Each part's own tensor, of one tensor for each matrix."""
        return list(ys[0].split(self.sizes, dim) if len(ys) < len(self.parts) else ys)

    def join(self, ys: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each matrix, of one for each part: their last dimensions are joined."""
        return [torch.cat(list(ys), -1)] if self.is_one_matrix and len(ys) > 1 else list(ys)

    def start_all_gather(self, dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to gather the matrices in `dtype`. Called by all ranks of x."""
        size = self.axis.size
        if size == 1:
            return Pending.done([part.to_send(dtype, 1) for part in self.parts])
        own = [part.to_send(dtype, size) for part in self.parts]
        rows = [size * len(one) for one in own]
        whole = own[0].new_empty(sum(rows), own[0].shape[1])
        gathered = [whole] if len(own) == 1 else list(whole.split(rows))
        work = self.axis.gather_into(gathered, own)
        if sum(rows) == sum(self.sizes):
            return Pending(work, lambda: [whole])
        return Pending(work, lambda: [one[:n] for one, n in zip(gathered, self.sizes, strict=True)])

    def start_reduce_scatter(self, gradients: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Start to sum the gradients of the matrices, partial over x. Gives the gradient of each parameter."""
        parts, size = self.split(gradients, 0), self.axis.size
        if size == 1:
            return Pending.done(self._as_stored(parts))
        parts = [own.to_add_up(one) for own, one in zip(self.parts, parts, strict=True)]
        parts = [pad(one, (0, 0, 0, -len(one) % size)) if len(one) % size else one for one in parts]
        pending = self.axis.reduce_scatter_each([one.view(size, -1, one.shape[1]) for one in parts])
        return Pending(None, lambda: self._as_stored(pending.wait()))

    def _as_stored(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Of each parameter: one of which parts hold some rows each is put together."""
        stored: dict[Tensor, Tensor] = {}
        for part, gradient in zip(self.parts, gradients, strict=True):
            if part.rows is None:
                stored[part.parameter] = part.as_stored(gradient)
                continue
            dtype = gradient_dtype(part.parameter)
            whole = stored.setdefault(part.parameter, torch.zeros_like(part.parameter, dtype=dtype))
            whole[part.rows] = gradient[:, : whole.shape[1]]
        return list(stored.values())


_Followers = dict[ShardedWeight, ShardedWeight]


@dataclass(eq=False)
class PrefetchOrder:
    """The order in which a stage uses its weights, recorded as it runs, so that the next ones can be prefetched.

    forward      block 0: a b     block 1: c d         b is followed by c
    backward     block 1: c d     block 0: a b         blocks that are recomputed: d is followed by a
    """

    forward: _Followers = field(default_factory=dict)
    recomputation: _Followers = field(default_factory=dict)
    prefetched: list[ShardedWeight] = field(default_factory=list)
    """the weights that follow the last one"""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self, *, recomputes: bool = False) -> None:
        """A stage's forward or backward begins: its first weight doesn't follow the last one of the run before."""
        self._following = self.recomputation if recomputes else self.forward
        self._last: ShardedWeight | None = None

    def record(self, weight: ShardedWeight) -> list[ShardedWeight]:
        """Record that `weight` is used now, and return those that followed it last time."""
        if self._last is not None:
            self._following[self._last] = weight
        self._last = weight
        expected: list[ShardedWeight] = []
        following = self._following.get(weight)
        while len(expected) < _MAX_PREFETCHED and following is not None:
            expected.append(following)
            following = self._following.get(following)
        return expected


_Sum = tuple[Sequence[Tensor], Pending[list[Tensor]], Sequence[bool]]
"""the parameters, their gradients, and which of them are trained"""


class StageWeights:
    """Weights that the layers of one stage have gathered, and their gradients on the way to the parameters.

        keeps_weights = False    each product gathers its weight, while the one before computes; each backward
                                 reduce-scatters the gradients over x, while it goes on
        keeps_weights = True     the first forward of a batch gathers each weight, and all products use it; each
                                 backward adds its gradients to this rank's sums, which the last one reduce-scatters

    All ranks of the cube keep the same, since they run the same actions. In a batch, the last reduce-scatters of a
    backward are also under way while the next actions run, until the next backward makes its own, or
    `finish_gradients` is called. Of two actions that run at once, at most one makes gradients of the stage's weights.

    Args:
        queue: takes the gradients that the stage's split backward leaves for later; None: it leaves none.
        turns: which of two actions runs now.
        keeps_weights: whether weights are gathered, and their gradients reduce-scattered, once a batch.
    """

    def __init__(self, queue: WeightGradients | None, turns: DeviceTurns, keeps_weights: bool) -> None:
        self.queue, self.turns, self.keeps_weights = queue, turns, keeps_weights
        self.is_in_batch = False
        order = PrefetchOrder()
        self._orders = order, PrefetchOrder(order.forward, order.recomputation)
        """of each of two actions that run at once, each at a place of its own"""
        self._gathered: dict[tuple[ShardedWeight, int | None], tuple[Any, Pending[list[Tensor]]]] = {}
        """with the versions and the dtype that were gathered; by weight, and the slot of the action that may use it"""
        self._sums: dict[ShardedWeight, tuple[list[Tensor], list[bool]]] = {}
        """this rank's gradients of a weight's gathered matrices, and whether each of its parameters has any"""
        self._are_last = False
        """whether no later action makes gradients in this batch"""
        self._pending: deque[_Sum] = deque()
        self._has_callback = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_gathered": {}}

    @property
    def prefetch_order(self) -> PrefetchOrder:
        """The order of weights, with the place of the action that runs now."""
        return self._orders[self.turns.slot]

    def begin_batch(self) -> None:
        """A batch begins: drop all that a failure in the batch before may have left."""
        self._drop_gathered()
        self.drop_transfers()
        self.is_in_batch = True

    def end_batch(self) -> None:
        """A batch has ended: the optimizer changes the weights now. Backwards outside of batches leave nothing."""
        self.finish_gradients()
        self._drop_gathered()
        self.is_in_batch = False

    def drop_transfers(self) -> None:
        """After a failure, when the process groups have been left: free what was under way, which keeps connections."""
        self.is_in_batch, self._has_callback, self._are_last = False, False, False
        self._gathered.clear()
        self._sums.clear()
        self._pending.clear()

    def expect_last_gradients(self) -> None:
        """The next gradients of the stage's weights are the last ones in this batch."""
        self._are_last = True

    def keeps(self, weight: ShardedWeight) -> bool:
        """Whether micro-batches share its gathered matrices, and add up their gradients before ranks do."""
        return self.keeps_weights and self.is_in_batch and weight.is_gathered

    def gather(self, weight: ShardedWeight, dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to gather a weight's matrices in `dtype`, or take those that are there. Called by all ranks of x."""
        key, state = self._key(weight), (weight.versions, dtype)
        before, matrices = self._gathered.pop(key, (None, None))
        if matrices is None or before != state:
            if matrices is not None:
                matrices.wait()  # its memory isn't free before
            matrices = weight.start_all_gather(dtype)
        if self.keeps(weight):
            self._gathered[key] = state, matrices
        return matrices

    def prefetch_after(self, weight: ShardedWeight, dtype: torch.dtype) -> None:
        """Start to gather the weights that followed this one last time, while its layer computes. Called by all ranks.

        One that was prefetched, but is no longer expected, is dropped.
        """
        order = self.prefetch_order
        expected = order.record(weight)
        for other in order.prefetched:
            if other is not weight and other not in expected:
                _, dropped = self._gathered.pop((other, self.turns.slot), (None, None))
                if dropped is not None:
                    dropped.wait()
        order.prefetched = expected
        for following in expected:
            if following.is_gathered:
                self._gathered[self._key(following)] = (following.versions, dtype), self.gather(following, dtype)

    def add(self, weight: ShardedWeight, gradients: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Add the gradients of a weight's matrices, partial over x, to those of its `trained` parameters.

        Called inside a backward. They have been added at its end, or after `finish_gradients`.
        """
        total, trained = list(gradients), list(trained)
        if self.keeps(weight):
            dtype = weight.gradient_dtype
            total = [gradient.to(dtype) for gradient in gradients]
            if weight in self._sums:
                before, was_trained = self._sums.pop(weight)
                total = [old.add_(one) for old, one in zip(before, total, strict=True)]
                trained = [a or b for a, b in zip(was_trained, trained, strict=True)]
            if not self._are_last:
                self._sums[weight] = total, trained
                return
        if not self._has_callback and not self.is_in_batch:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish_gradients)
            self._has_callback = True
        self._pending.append(_start_sum(weight, total, trained))
        _finish(self._pending, leave=_MAX_PENDING)

    def finish_gradients(self) -> None:
        """The stage's gradients are complete once this returns: the last sums have arrived."""
        self._has_callback = False
        sums, self._sums, self._are_last = self._sums, {}, False
        self._pending.extend(_start_sum(weight, *total) for weight, total in sums.items())
        _finish(self._pending)

    def _key(self, weight: ShardedWeight) -> tuple[ShardedWeight, int | None]:
        return weight, None if self.keeps(weight) else self.turns.slot

    def _drop_gathered(self) -> None:
        """Free gathered weights, once their collectives have ended."""
        while self._gathered:
            _, (_, matrices) = self._gathered.popitem()
            matrices.wait()


def _start_sum(weight: ShardedWeight, gradients: Sequence[Tensor], trained: Sequence[bool]) -> _Sum:
    return weight.parameters, weight.start_reduce_scatter(gradients), trained


def _finish(sums: deque[_Sum], leave: int = 0) -> None:
    """Wait for sums, the earliest first, and add them to their parameters' gradients; so many are left under way."""
    while len(sums) > leave:
        parameters, pending, trained = sums.popleft()
        gradients = pending.wait()
        with torch._C.DisableTorchFunctionSubclass():  # both are this rank's parts
            for parameter, gradient, trains in zip(parameters, gradients, trained, strict=True):
                if not trains:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)
