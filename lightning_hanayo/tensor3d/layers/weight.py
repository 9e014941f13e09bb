"""The weight: a linear layer's shard, brought together along x for a product, and its gradient's way back.

stored    [N/(y x), K/z]    (or transposed, as a `Conv1D` of Hugging Face has it)
whole     [N/y, K/z]        what one rank multiplies with

Parts that don't divide are padded with zeros on the way; what is stored has no padding.
"""

from copy import copy, deepcopy
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor3d.mesh import MeshAxis, Pending
from lightning_hanayo.weight_gradients import WeightGradients


class Weight:
    """One layer's.

    Args:
        module: has it as its parameter `name`, this rank's shard.
        axis: x.
        shape: [N/y, K/z], rounded up.
        transposed: whether the parameter is [K/z, N/(y x)].
        late: takes the gradients whose sums are under way while a backward runs.
        queue: takes the gradients that the stage's backward leaves for later; None: nothing is left.
        name: the parameter's.
        rows: the part of the parameter that is meant, where it holds several weights; None: all of it.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: MeshAxis,
        shape: tuple[int, int],
        *,
        transposed: bool,
        late: "LateSums",
        queue: WeightGradients | None = None,
        name: str = "weight",
        rows: slice | None = None,
    ) -> None:
        self._module = module
        self._name = name
        self._rows = rows
        self._axis = axis
        self._shape = shape
        self._transposed = transposed
        self._ahead: tuple[tuple[int, torch.dtype], Pending] | None = None
        self.late = late
        self.queue = queue

    def __deepcopy__(self, memo: Any) -> "Weight":
        twin = copy(self)
        twin._module = memo.get(id(self._module), self._module)  # the copy of the module, which is under way
        twin._ahead = None
        return twin

    @property
    def parameter(self) -> nn.Parameter:
        """The shard, as the module has it now."""
        parameter = self._module._parameters[self._name]
        assert parameter is not None
        return parameter

    def start(self, dtype: torch.dtype) -> Pending:
        """Start to bring the weight together in `dtype`, unless that has been done ahead. Called by all of x."""
        if self._ahead is not None and self._ahead[0] == (self.parameter._version, dtype):
            (_, there), self._ahead = self._ahead, None
            return there
        self.forget_ahead()
        return self._start(dtype)

    def start_ahead(self, dtype: torch.dtype) -> None:
        """Start it for the next product, which another layer's compute can hide."""
        if self._ahead is None and self._axis.size > 1:
            self._ahead = (self.parameter._version, dtype), self._start(dtype)

    def forget_ahead(self) -> None:
        """Free what `start_ahead` has gathered, once the collective is done."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].wait()

    def start_sum(self, gradient: Tensor) -> Pending:
        """[N/y, K/z], partial over x, to the parameter's gradient."""
        rows, columns = self._shape
        if missing := -rows % self._axis.size:
            gradient = pad(gradient, (0, 0, 0, missing))
        arriving = self._axis.reduce_scatter(gradient.unflatten(0, (self._axis.size, -1)))
        return Pending(None, lambda: self._stored(arriving.wait()))

    def _start(self, dtype: torch.dtype) -> Pending:
        stored = self.parameter.detach()
        stored = stored if self._rows is None else stored[self._rows]
        rows = (stored.t() if self._transposed else stored).to(dtype)
        per_rank = -(-self._shape[0] // self._axis.size)
        if missing := (self._shape[1] - rows.shape[1], per_rank - rows.shape[0]):
            rows = pad(rows, (0, missing[0], 0, missing[1])) if any(missing) else rows
        arriving = self._axis.all_gather(rows)
        return Pending(None, lambda: arriving.wait().flatten(0, 1)[: self._shape[0]])

    def _stored(self, gradient: Tensor) -> Tensor:
        stored = self.parameter
        gradient = gradient.t() if self._transposed else gradient
        if self._rows is not None:
            whole = torch.zeros_like(stored)
            whole[self._rows] = gradient[:, : stored.shape[1]]
            return whole
        return gradient[: stored.shape[0], : stored.shape[1]].to(stored.dtype).contiguous()


class HasWeight(Protocol):
    """A layer's part in the grid."""

    weight: Any


Part = TypeVar("Part", bound=HasWeight)


def with_own_weight(part: Part, memo: Any) -> Part:
    """A copy of a layer's part, for a copy of the layer: all is shared but the weight, which is the copy's."""
    twin = copy(part)
    twin.weight = deepcopy(part.weight, memo)
    return twin


class Order:
    """The order in which a stage's layers are called, learnt as they are: what comes next can be gathered ahead.

    forward      block 0: a b     block 1: c d         b is followed by c
    backward     block 1: c d     block 0: a b         blocks that are computed again: d is followed by a

    Args:
        depth: how many weights may be on their way, or there, before they are needed.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._forward: dict[Weight, Weight] = {}
        self._recomputation: dict[Weight, Weight] = {}
        self._following = self._forward
        self._last: Weight | None = None
        self._ahead: list[Weight] = []

    def begin(self, *, recomputes: bool = False) -> None:
        """A stage's forward or backward begins: what was called last isn't followed by what is called first here."""
        self._following = self._recomputation if recomputes else self._forward
        self._last = None

    def after(self, weight: Weight) -> list[Weight]:
        """Record that `weight` is used now; return what followed it last time. Called by all ranks of the grid.

        What was gathered ahead, but doesn't come next any more, is let go.
        """
        if self._last is not None:
            self._following[self._last] = weight
        self._last = weight
        ahead: list[Weight] = []
        following = self._following.get(weight)
        while len(ahead) < self._depth and following is not None:
            ahead.append(following)
            following = self._following.get(following)
        for other in self._ahead:
            if other is not weight and other not in ahead:
                other.forget_ahead()
        self._ahead = ahead
        return list(ahead)

    def forget(self) -> None:
        """A batch begins: let go of what was gathered ahead in the one before, whose weights may be other ones."""
        for weight in self._ahead:
            weight.forget_ahead()
        self._ahead = []


class LateSums:
    """Weight gradients whose sums over x are under way, while the backward goes on.

    At most `depth` of them: each holds the whole gradient's memory until it is there.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth
        self._waiting: list[tuple[Tensor, Pending]] = []
        self._is_announced = False

    def add(self, parameter: Tensor, gradient: Pending) -> None:
        """Called inside a backward, at whose end the gradient will be in `parameter.grad`."""
        if not self._is_announced:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.finish)
            self._is_announced = True
        self._waiting.append((parameter, gradient))
        while len(self._waiting) > self._depth:
            self._finish_first()

    def finish(self) -> None:
        """Wait for all."""
        self._is_announced = False
        while self._waiting:
            self._finish_first()

    def forget(self) -> None:
        """Drop all, after a failure."""
        self._waiting.clear()
        self._is_announced = False

    def _finish_first(self) -> None:
        parameter, pending = self._waiting.pop(0)
        gradient = pending.wait()
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
