"""A layer's sharded weight: its all-gather along x for a product, and the reduce-scatter of its gradient.

stored      [N/(y x), K/z]    (or transposed, as a `Conv1D` of Hugging Face stores it)
gathered    [N/y, K/z]        the matrix of one rank's product

Parts that don't divide are padded with zeros before the collective. The stored shard has no padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
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


@dataclass
class GradientSum:
    """This rank's gradients of a weight's gathered matrices, and whether each of its parameters has any."""

    matrices: list[Tensor]
    trained: list[bool]


@dataclass(eq=False)
class BatchWeights:
    """Gathered weights, and sums of their gradients, that one stage keeps for all micro-batches of a batch.

        first forward       gathers each weight
        from then on        products use the gathered weights
        each backward       adds its gradients of the gathered weights to this rank's sums
        the last one        reduce-scatters the sums

    Otherwise each micro-batch gathers its weights, and reduce-scatters their gradients. All ranks of the cube keep the
    same, since they run the same actions.
    """

    is_on: bool
    """whether anything is kept"""
    turns: DeviceTurns
    """which of two actions runs now"""
    is_open: bool = field(default=False, init=False)
    """whether a batch runs that keeps weights"""

    def __post_init__(self) -> None:
        self._gathered: dict[Hashable, tuple[Sequence[int], Pending[list[Tensor]]]] = {}
        """by weight and dtype, with the versions of the parameters that were gathered"""
        self._sums: dict[ShardedWeight, GradientSum] = {}
        self._last: tuple[int, int] | None = None
        """the action whose gradients are the last ones"""

    def begin_batch(self) -> None:
        """Forget all that a failure in the batch before may have left."""
        self.end_batch()
        self.is_open = self.is_on

    def end_batch(self) -> None:
        """Free all: the optimizer changes the weights now."""
        self.is_open, self._last = False, None
        self._gathered.clear()
        self._sums.clear()

    def keeps(self, weight: ShardedWeight) -> bool:
        """Whether micro-batches share its gathered matrices, and add up their gradients before ranks do."""
        return self.is_open and weight.is_gathered

    def gathered(self, weight: ShardedWeight, dtype: torch.dtype) -> Pending[list[Tensor]] | None:
        """The matrices, if an earlier product has gathered them and the parameters haven't changed since."""
        versions, pending = self._gathered.get((weight, dtype), ((), None))
        return pending if versions == weight.versions else None

    def keep(self, weight: ShardedWeight, dtype: torch.dtype, matrices: Pending[list[Tensor]]) -> None:
        """Keep gathered matrices until the batch ends."""
        if self.keeps(weight):
            self._gathered[weight, dtype] = weight.versions, matrices

    def expect_last(self) -> None:
        """The action that begins now makes the last gradients."""
        self._last = self._action

    def add(self, weight: ShardedWeight, gradients: Sequence[Tensor], trained: Sequence[bool]) -> GradientSum | None:
        """Add a micro-batch's gradients of the matrices. Returns the sum if it is to be reduce-scattered now."""
        if not self.keeps(weight):
            return GradientSum(list(gradients), list(trained))
        before, dtype = self._sums.pop(weight, None), weight.gradient_dtype
        own = [gradient.to(dtype) for gradient in gradients]
        if before is not None:
            own = [total.add_(one) for total, one in zip(before.matrices, own, strict=True)]
            trained = [a or b for a, b in zip(before.trained, trained, strict=True)]
        made = GradientSum(own, list(trained))
        if self._last == self._action:
            return made
        self._sums[weight] = made
        return None

    def take_sums(self) -> dict[ShardedWeight, GradientSum]:
        """The sums that no action has reduce-scattered."""
        sums, self._sums, self._last = self._sums, {}, None
        return sums

    @property
    def _action(self) -> tuple[int, int]:
        return self.turns.number, self.turns.slot


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


_Key = tuple[tuple[int, ...], torch.dtype]


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
    pending_gradients: PendingGradients
    """takes gradients whose reduce-scatter is under way while a backward runs"""
    queue: WeightGradients | None
    """takes the gradients that the stage's split backward leaves for later; None: it leaves none"""
    _prefetched: dict[int, tuple[_Key, Pending[list[Tensor]]]] = field(default_factory=dict, init=False)
    """by slot: of two actions at once each prefetches for itself"""

    def __post_init__(self) -> None:
        self.turns, self.batch = self.pending_gradients.turns, self.pending_gradients.batch
        self.sizes = [part.shape[0] for part in self.parts]
        """the out-features of each part, once it is gathered"""
        divides = not any(size % self.axis.size for size in self.sizes)
        self.is_one_matrix = len(self.parts) == 1 or (self.axis.size > 1 and divides)
        """whether the gathered parts are the rows of one matrix"""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_prefetched": {}}

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

    def start_all_gather(self, dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to gather the matrices in `dtype`, or take those that are there. Called by all ranks of x."""
        if (kept := self.batch.gathered(self, dtype)) is not None:
            return kept
        prefetched = self._prefetched.get(self.turns.slot)
        if prefetched is not None and prefetched[0] == (self.versions, dtype):
            del self._prefetched[self.turns.slot]
            matrices = prefetched[1]
        else:
            self.drop_prefetched()
            matrices = self._start(dtype)
        self.batch.keep(self, dtype, matrices)
        return matrices

    def prefetch(self, dtype: torch.dtype) -> None:
        """Start to gather the weight for its next product, while another layer computes."""
        slot = self.turns.slot
        if slot not in self._prefetched and self.is_gathered and self.batch.gathered(self, dtype) is None:
            self._prefetched[slot] = (self.versions, dtype), self._start(dtype)

    def drop_prefetched(self) -> None:
        """Free a prefetched weight, once its collective has ended."""
        prefetched = self._prefetched.pop(self.turns.slot, None)
        if prefetched is not None:
            prefetched[1].wait()

    def split(self, ys: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Each part's own tensor, of one tensor for each matrix."""
        return list(ys[0].split(self.sizes, dim) if len(ys) < len(self.parts) else ys)

    def join(self, ys: Sequence[Tensor]) -> list[Tensor]:
        """One tensor for each matrix, of one for each part: their last dimensions are joined."""
        return [torch.cat(list(ys), -1)] if self.is_one_matrix and len(ys) > 1 else list(ys)

    def start_reduce_scatter(self, gradients: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Start to sum the gradients of the matrices, partial over x. Gives the gradient of each parameter."""
        parts, size = self.split(gradients, 0), self.axis.size
        if size == 1:
            return Pending.done(self._as_stored(parts))
        parts = [own.to_add_up(one) for own, one in zip(self.parts, parts, strict=True)]
        parts = [pad(one, (0, 0, 0, -len(one) % size)) if len(one) % size else one for one in parts]
        pending = self.axis.reduce_scatter_each([one.view(size, -1, one.shape[1]) for one in parts])
        return Pending(None, lambda: self._as_stored(pending.wait()))

    def _start(self, dtype: torch.dtype) -> Pending[list[Tensor]]:
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

    def twin(self) -> PrefetchOrder:
        """Of another action that may run at the same time: it follows the same order, at a place of its own."""
        made = PrefetchOrder()
        made._forward, made._recomputation = self._forward, self._recomputation
        return made

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

    def forget(self) -> None:
        """After a failure: free what was prefetched, and wait for nothing."""
        for weight in self._prefetched:
            weight._prefetched.clear()
        self._prefetched = []

    def drop_prefetched(self) -> None:
        """A batch begins: free weights that were prefetched in the batch before, and may have changed."""
        for weight in self._prefetched:
            weight.drop_prefetched()
        self._prefetched = []


class PendingGradients:
    """Weight gradients whose reduce-scatter over x is under way, while the backward goes on.

    If it `ends_late`, the last ones are also under way while the next actions run, until the next backward makes its
    own or `finish` is called. Of two actions that run at once, each waits for its own only, as planned.

    Args:
        turns: which of two actions runs now.
        batch: adds up the gradients of several micro-batches, if it is on.
    """

    def __init__(self, turns: DeviceTurns, batch: BatchWeights) -> None:
        self.ends_late = False
        self.batch, self.turns = batch, turns
        self._pending: dict[tuple[int, int], deque[_Sum]] = {}
        """by the pair and the slot of the action that has made them, in their order"""
        self._has_callback = False

    def add(self, weight: ShardedWeight, gradients: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Add the gradients of a weight's matrices, partial over x, to those of its `trained` parameters.

        Called inside a backward. They have been added at its end, or after `finish`.
        """
        if (total := self.batch.add(weight, gradients, trained)) is None:
            return
        if not self._has_callback and not self.ends_late:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)
            self._has_callback = True
        own_sum = _start_sum(weight, total)
        action = self.turns.number, self.turns.slot
        for earlier in [one for one in self._pending if one[0] != action[0]]:
            self._finish(self._pending.pop(earlier, deque()))  # the other action finishes some while this one waits
        own = self._pending.setdefault(action, deque())
        own.append(own_sum)
        while len(own) > _MAX_PENDING:
            _finish(own.popleft())

    def finish(self) -> None:
        """Wait for all, and add them to their parameters' gradients."""
        self._has_callback = False
        sums = deque(_start_sum(weight, total) for weight, total in self.batch.take_sums().items())
        if sums:
            self._pending[-1, 0] = sums
        while self._pending:
            self._finish(self._pending.pop(next(iter(self._pending))))

    def discard(self) -> None:
        """Drop all, after a failure."""
        self._pending.clear()
        self._has_callback = False

    def _finish(self, several: deque[_Sum]) -> None:
        while several:
            _finish(several.popleft())


_Sum = tuple[Sequence[Tensor], Pending[list[Tensor]], Sequence[bool]]
"""the parameters, their gradients, and which of them are trained"""


def _start_sum(weight: ShardedWeight, gradients: GradientSum) -> _Sum:
    return weight.parameters, weight.start_reduce_scatter(gradients.matrices), gradients.trained


def _finish(one: _Sum) -> None:
    parameters, pending, trained = one
    gradients = pending.wait()
    with torch._C.DisableTorchFunctionSubclass():  # both are this rank's parts
        for parameter, gradient, trains in zip(parameters, gradients, trained, strict=True):
            if not trains:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
