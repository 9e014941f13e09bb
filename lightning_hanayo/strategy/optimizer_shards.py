"""Shards the optimizer over the data ranks (ZeRO-1): each updates its rows of every parameter, and has their states.

    p [6, 4] on 2 data ranks                      rank 0         rank 1
    forward, backward    p.data  whole            [6, 4]         [6, 4]
    reduce-scatter       p.grad  own rows summed  rows 0..2      rows 3..5
    optimizer.step()     p.data, p.grad, states   [3, 4]         [3, 4]
    all-gather           p.data  whole            [6, 4]         [6, 4]      behind forwards of earlier stages

The `Parameter` objects stay, as with master weights, which are of own rows, too. Parameters that can't be cut by rows
stay whole: sparse ones, those whose memory is in another order, and those with fewer rows than data ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC'20), section 5.1.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hanayo.dist_checkpointing.load_state import Sharding
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.tensor_parallel.collectives import padded, split_dim
from lightning_hanayo.tensor_parallel.mesh import MeshAxis, Pending

Rows = tuple[int, int, int]
"""the rows of a parameter that one data rank updates: its first dimension longer than 1, their start and number"""


@dataclass(eq=False, repr=False)
class OptimizerShards:
    """The rows of parameters that one data rank updates. All data ranks call its methods alike."""

    stages: Mapping[int, Sequence[nn.Parameter]]
    """the parameters of each stage of this rank"""
    axis: MeshAxis
    """the data ranks"""
    cube: Sharding | None
    """None without one"""
    _: KW_ONLY
    whole: InitVar[Collection[Tensor]] = ()
    """parameters that aren't cut"""
    scatters: bool = True
    """whether gradients are summed by a reduce-scatter, after which only own rows of `.grad` are sums, and there is
    none after the optimizer's step. Otherwise by an all-reduce: user code may read them"""

    def __post_init__(self, whole: Collection[Tensor]) -> None:
        excluded = frozenset(whole)
        found = ((p, _rows_of(p, self.axis)) for own in self.stages.values() for p in own if p not in excluded)
        self._rows: dict[Tensor, Rows] = {parameter: rows for parameter, rows in found if rows is not None}
        shapes: Mapping[Tensor, tuple[int, ...]] = {} if self.cube is None else self.cube.whole_shapes
        self.whole_shapes = {**shapes, **{p: shapes.get(p, tuple(p.shape)) for p in self._rows}}
        """of the parameters of whose states this rank holds a part"""
        self._local_shapes = {p: tuple(p.shape) for p in self._rows}
        self._replaced: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._under_way: dict[int, list[Pending[None]]] = {}

    def __contains__(self, parameter: object) -> bool:
        """Whether data ranks have different rows of it."""
        return parameter in self._rows

    def local_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of this rank's rows of a parameter; all of it if it isn't cut."""
        shape, rows = self._local_shapes.get(parameter, tuple(parameter.shape)), self._rows.get(parameter)
        return shape if rows is None else (*shape[: rows[0]], rows[2], *shape[rows[0] + 1 :])

    def num_replicas(self, parameter: Tensor) -> int:
        """How many ranks hold the same part of a gradient when a norm is taken, data ranks included."""
        in_cube = 1 if self.cube is None else self.cube.num_replicas(parameter)
        return in_cube if parameter in self._rows else in_cube * self.axis.size

    def own_rows(self, parameter: Tensor, value: Tensor) -> Tensor:
        """This rank's rows of a value with the parameter's shape; all of it if the parameter isn't cut."""
        rows = self._rows.get(parameter)
        return value if rows is None or value.shape != self._local_shapes[parameter] else value.narrow(*rows)

    # the optimizer's step

    def attach(self, optimizers: Sequence[Any]) -> None:
        """Cut the states that optimizers have made already, or will load. They treat each element alone."""
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                self._cut_states(optimizer)
                optimizer.register_load_state_dict_post_hook(self._cut_states)

    def keep_whole(self) -> None:
        """Cut no parameter: the optimizer needs whole ones."""
        self.whole_shapes = {} if self.cube is None else dict(self.cube.whole_shapes)
        self._rows.clear()
        self._local_shapes.clear()

    def put_in(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before an optimizer's step: let parameters, and their gradients, be own rows."""
        self.finish()
        for parameter in parameters:
            rows = self._rows.get(parameter)
            if rows is not None:
                whole, gradient = parameter.data, parameter.grad
                self._replaced[parameter] = whole, gradient
                set_values(parameter, whole.narrow(*rows), None if gradient is None else gradient.narrow(*rows))

    def take_out(self, *, gathers: bool) -> None:
        """After the step: whole parameters again. If it `gathers`, they get the other ranks' rows, in the background.

        Then do not read them before `finish`.
        """
        updated = {parameter for parameter in self._replaced if parameter.grad is not None}
        for parameter, (whole, gradient) in self._replaced.items():
            set_values(parameter, whole, None if gathers and self.scatters else gradient)
        self._replaced.clear()
        for stage, parameters in self.stages.items() if gathers else ():
            if own := [parameter for parameter in parameters if parameter in updated]:
                self._under_way.setdefault(stage, []).extend(self._start_gather(own))

    def finish(self, stage: int | None = None) -> None:
        """Wait until the stage's parameters are whole; all of them if None."""
        for one in [stage] if stage is not None else list(self._under_way):
            for pending in self._under_way.pop(one, ()):
                pending.wait()

    def abandon(self) -> None:
        """The run has failed: whole parameters, and no groups. After a step that failed own rows may be updated.

        Transfers under way stay until `drop_transfers`, as in `GradientAllReduce.forget`.
        """
        for parameter, (whole, _) in self._replaced.items():
            set_values(parameter, whole, None)
        self._replaced.clear()
        self.axis.disconnect("the run has failed. Build the model anew, and load a checkpoint.")

    def drop_transfers(self) -> None:
        """After a failure, when the groups have been left: free the transfers that were under way."""
        self._under_way.clear()

    def _cut_states(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and (part := self.own_rows(parameter, value)) is not value:
                    state[name] = part.clone()

    # collectives

    def sums(self, parameter: nn.Parameter, group: dist.ProcessGroup) -> bool:
        """Whether `reduce_scatter` sums the parameter's gradient, which is to be summed over the group."""
        return self.scatters and parameter in self._rows and group is self.axis.group

    def reduce_scatter(self, gradients: Sequence[Tensor]) -> Pending[None]:
        """Start to sum the gradients of parameters that are cut: own rows of each become sums over the data ranks."""
        sums = self.axis.reduce_scatter_each([self._parts(one) for one in gradients])

        def finish() -> None:
            for gradient, rows in zip(gradients, sums.wait(), strict=True):
                self._put_rows(gradient, rows)

        return Pending(None, finish)

    def _start_gather(self, parameters: Sequence[nn.Parameter]) -> Iterator[Pending[None]]:
        """Start to bring each rank's rows to all others: one collective for each dtype."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            values = [parameter.data for parameter in parameters if parameter.dtype is dtype]
            wholes = list(map(self._parts, values))  # of equal parts the parameters' own memory, else copies
            work = self.axis.gather_into(wholes, [whole[self.axis.rank] for whole in wholes])
            yield Pending(work, partial(_copy_back, values, wholes))

    def _parts(self, value: Tensor) -> Tensor:
        """[size, ...]: the rows of each data rank, padded to equally many."""
        return split_dim(value.flatten(0, _dim_of(value)), self.axis.size, 0)

    def _put_rows(self, whole: Tensor, rows: Tensor) -> None:
        """Write this rank's rows, perhaps padded, into memory of its own of the whole."""
        length = whole.shape[_dim_of(whole)]
        part = -(-length // self.axis.size)
        own = whole.flatten(0, _dim_of(whole))[self.axis.rank * part : (self.axis.rank + 1) * part]
        own.copy_(rows.view(-1, *own.shape[1:])[: len(own)])

    # checkpoints: how states, and master weights, are sharded

    def region(self, parameter: Tensor) -> Region:
        """Which entries of the whole parameter this rank's rows are."""
        shape, rows = self._local_shapes.get(parameter, tuple(parameter.shape)), self._rows.get(parameter)
        found = Region.whole(shape) if self.cube is None else self.cube.region(parameter)
        return found if rows is None else found.narrow(rows[0], rows[1], rows[1] + rows[2])

    def unshard(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Gather something of which each rank has its own rows, on the CPU. Called by all ranks with this stage."""
        rows = self._rows.get(parameter)
        if rows is not None and part.shape == self.local_shape(parameter):
            shape, device = self._local_shapes[parameter], next(iter(self._rows)).device
            dim = rows[0]
            equal = padded(part.detach().to(device), dim, -(-shape[dim] // self.axis.size)).contiguous()
            part = self.axis.all_gather(equal).wait().view(-1, *shape[dim + 1 :])[: shape[dim]].view(shape)
        return part.detach().cpu() if self.cube is None else self.cube.unshard(part, parameter)


def _copy_back(values: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    for value, whole in zip(values, wholes, strict=True):
        if whole.data_ptr() != value.data_ptr():
            value.view(-1).copy_(whole.view(-1)[: value.numel()])


def set_values(parameter: nn.Parameter, data: Tensor, gradient: Tensor | None) -> None:
    """Give a parameter other values and another gradient, maybe of another shape, dtype or device."""
    parameter.grad = None  # the old one may not fit the new values
    parameter.data = data
    parameter.grad = gradient


def _rows_of(parameter: Tensor, axis: MeshAxis) -> Rows | None:
    if parameter.is_meta or not parameter.is_contiguous() or parameter.layout is not torch.strided:
        return None
    dim = _dim_of(parameter)
    length = parameter.shape[dim] if parameter.dim() else 0
    if length < axis.size or not parameter.numel():
        return None
    part = -(-length // axis.size)
    start = min(length, axis.rank * part)
    return dim, start, min(part, length - start)


def _dim_of(tensor: Tensor) -> int:
    """The first dimension that is longer than 1, so that rows are contiguous."""
    return next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)
