"""Deals whole parameters over the ranks of data x cube, for optimizers that compute with rows, norms or matrices.

    W [6, 4] of rank 1, on the cube (1, 2, 1)      rank 0               rank 1
    forward, backward, clipping    p.data, p.grad  [3, 4], [3, 4]       [3, 4], [3, 4]
    optimizer.step()               p.data, p.grad  [3, 4], None         [6, 4], [6, 4]     gathered by its owner
    afterwards                     p.data, p.grad  [3, 4], [3, 4]       [3, 4], [3, 4]     new values, sent by its owner

The other ranks' optimizers pass it over, as it has no gradient there, and so only its owner has states of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor_parallel.sharding import DimShard, Shard

ShapeAndType = tuple[tuple[int, ...], torch.dtype]


class OptimizerOwners:
    """The owners of one pipeline rank's parameters. All ranks of data x cube call its methods alike.

    Args:
        parameters: of all optimizers, those of other pipeline ranks left out.
        axis: these ranks, those of a cube next to each other.
        control: the same, for tensors in host memory (gloo).
        device: for which `axis` is.
        mesh: of the cube.
        shard_of: how the cube holds a parameter; None without a cube.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        axis: MeshAxis,
        control: dist.ProcessGroup,
        device: torch.device,
        mesh: Mesh,
        shard_of: Callable[[Tensor], Shard] | None,
    ) -> None:
        self._axis = axis
        self._control: dist.ProcessGroup | None = control
        self._device = device
        self._mesh = mesh
        self._shard_of = shard_of or (lambda parameter: Shard(tuple(map(DimShard, parameter.shape))))
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * axis.size
        self._replaced: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._deal(parameters)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates the parameter, and has its states."""
        return self._owners.get(parameter) == self._axis.rank

    def put_in(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer's step: those that this rank owns are whole, the others have no gradient."""
        self._deal(parameters)
        trained = self._with_gradients(parameters)
        self._replaced = {parameter: (parameter.data, parameter.grad) for parameter in trained}
        sent: list[list[Tensor]] = [[] for _ in range(self._axis.size)]
        expected: list[list[ShapeAndType]] = [[] for _ in range(self._axis.size)]
        for parameter, (data, gradient) in self._replaced.items():
            assert gradient is not None
            shard, owner = self._shard_of(parameter), self._owners[parameter]
            sources = self._sources(shard, owner)
            if self._axis.rank in sources:
                sent[owner] += [data, gradient]
            for rank in sources if self.owns(parameter) else ():
                shape = shard.local_shape(self._mesh, self._place(rank))
                expected[rank] += [(shape, data.dtype), (shape, gradient.dtype)]
        received = self._exchange(sent, expected)
        for parameter, (data, gradient) in self._replaced.items():
            assert gradient is not None
            parameter.grad = None
            if self.owns(parameter):
                shard = self._shard_of(parameter)
                sources = self._sources(shard, self._axis.rank)
                if sources:
                    data, gradient = (one.new_empty(shard.shape) for one in (data, gradient))
                for rank in sources:
                    for whole in (data, gradient):
                        shard.put(whole, next(received[rank]), self._mesh, self._place(rank))
                parameter.data = data
                parameter.grad = gradient

    def take_out(self) -> None:
        """After the step: each rank's own part again, with the values that the owners have given it."""
        sent: list[list[Tensor]] = [[] for _ in range(self._axis.size)]
        expected: list[list[ShapeAndType]] = [[] for _ in range(self._axis.size)]
        for parameter, (data, _) in self._replaced.items():
            expected[self._owners[parameter]].append((tuple(data.shape), data.dtype))
            if self.owns(parameter):
                shard = self._shard_of(parameter)
                for rank, own in enumerate(sent):
                    own.append(shard.of(parameter.data, self._mesh, self._place(rank)))
        received = self._exchange(sent, expected)
        owners, replaced = self._owners, list(self._replaced)
        self._put_back()
        with torch.no_grad():
            for parameter in replaced:  # not its data: all ranks have to see that its version has changed
                parameter.copy_(next(received[owners[parameter]]))

    def abandon(self) -> None:
        """The run has failed: each rank's own part, and no groups."""
        self._put_back()
        self._control = None
        self._axis.disconnect("the run has failed. Build the model anew, and load a checkpoint.")

    def _put_back(self) -> None:
        for parameter, (data, gradient) in self._replaced.items():
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
        self._replaced = {}

    def _deal(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give each new parameter, the largest first, to the rank that has the fewest elements."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        sizes: Mapping[nn.Parameter, int] = {parameter: prod(self._shard_of(parameter).shape) for parameter in new}
        for parameter in sorted(new, key=lambda one: (not one.requires_grad, -sizes[one])):
            owner = self._owners[parameter] = self._loads.index(min(self._loads))
            self._loads[owner] += sizes[parameter]

    def _with_gradients(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those that have a gradient on all ranks."""
        present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(present, dist.ReduceOp.MIN, group=self._control)
        return [one for one, is_present in zip(parameters, present.tolist(), strict=True) if is_present]

    def _sources(self, shard: Shard, owner: int) -> list[int]:
        """The ranks that send the owner its parts, one of each: its own data rank's. None where it has the whole."""
        if self._mesh.size(shard.axes) == 1:
            return []
        first = owner // self._mesh.num_ranks * self._mesh.num_ranks
        others = [i for i, axis in enumerate("xyz") if axis not in shard.axes]
        return [first + i for i, place in enumerate(self._mesh.places) if not any(place[axis] for axis in others)]

    def _place(self, rank: int) -> tuple[int, int, int]:
        return self._mesh.places[rank % self._mesh.num_ranks]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[ShapeAndType]]
    ) -> list[Iterator[Tensor]]:
        """Send each rank its tensors, as one message of bytes; return those that each rank has sent."""
        at_step = next((data.device for data, _ in self._replaced.values()), self._device)  # maybe host memory
        empty = torch.empty(0, dtype=torch.uint8, device=at_step)
        parts = [torch.cat([empty, *map(_as_bytes, tensors)]).to(self._device) for tensors in sent]
        sizes = [[prod(shape) * dtype.itemsize for shape, dtype in tensors] for tensors in expected]
        lengths = [sum(one) for one in sizes]
        rows = self._axis.exchange_rows(torch.cat(parts), [len(part) for part in parts], lengths).wait()
        received = rows.to(at_step).split(lengths)
        return [
            # a copy, as memory for numbers of several bytes has to be aligned
            (part.clone().view(dtype).view(shape) for part, (shape, dtype) in zip(one.split(own), tensors, strict=True))
            for one, own, tensors in zip(received, sizes, expected, strict=True)
        ]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
