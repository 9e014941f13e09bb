"""The grid: the ranks that hold one copy of a layer together, and the collectives along its axes.

x, y, z = 2, 2, 2        rank = (x * 2 + y) * 2 + z

        z=0   z=1
  y=0    0     1      x = 0            axis "z" of rank 1: 0, 1        axis "yz" of rank 1: 0, 1, 2, 3
  y=1    2     3                       axis "x" of rank 1: 1, 5
  y=0    4     5      x = 1
  y=1    6     7
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.topology import Topology

PLANES = ("x", "y", "z", "xy", "xz", "yz", "xyz")
"""the axes a collective runs along, alone or several as one"""


class Waitable(Protocol):
    """What is under way."""

    def wait(self) -> Any:
        """Until it is there."""


@dataclass
class Pending:
    """A collective under way. Its operands are nobody else's until `wait`."""

    work: "Waitable | None"
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result, once it is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.finish()


@dataclass
class Transfers:
    """Several transfers under way, as one."""

    works: list[dist.Work]

    def wait(self) -> None:
        """For all of them."""
        for work in self.works:
            work.wait()


class MeshAxis:
    """The ranks that differ along one axis of a grid, or along several taken as one. At size 1 nothing is sent.

    All its methods are called by all of its ranks, in the same order; each starts a collective and returns at once.

    Args:
        group: these ranks; None where there is one.
        size: how many they are.
        place: this rank's among them.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, place: int) -> None:
        self.group = group
        self.size = size
        self.place = place
        self._native = group if group is not None and dist.get_backend(group) != "gloo" else None
        """the group, if its own collectives are as good as they can be"""

    def __getstate__(self) -> dict[str, int]:
        """A process group belongs to its process: a pickled axis knows its size, and no other rank."""
        return {"size": self.size, "place": self.place}

    def __setstate__(self, state: dict[str, int]) -> None:
        gone: Any = _GoneGroup() if state["size"] > 1 else None
        vars(self).update(state, group=gone, _native=gone)

    def all_gather(self, tensor: Tensor) -> Pending:
        """[...] of each to [size, ...]."""
        if self.size == 1:
            return Pending(None, lambda: tensor.unsqueeze(0))
        whole, own = tensor.new_empty(self.size, *tensor.shape), tensor.contiguous()
        if self._native is not None:
            return Pending(self._native._allgather_base(whole.view(-1), own.view(-1)), lambda: whole)
        return Pending(self._exchange([own] * self.size, whole), lambda: whole)

    def reduce_scatter(self, parts: Tensor) -> Pending:
        """[size, ...] of each to the sum [...] over all of the part that is this rank's.

        gloo's own reduce-scatter sends everything twice: there the parts are exchanged, and summed where they arrive.
        """
        if self.size == 1:
            return Pending(None, lambda: parts.squeeze(0))
        if self._native is not None:
            own, options = parts.new_empty(parts.shape[1:]), dist.ReduceScatterOptions()
            return Pending(self._native._reduce_scatter_base(own.view(-1), parts.reshape(-1), options), lambda: own)
        arriving = self.all_to_all(parts)
        return Pending(None, lambda: arriving.wait().sum(0))

    def all_to_all(self, parts: Tensor) -> Pending:
        """[size, ...], the i-th for rank i, to [size, ...], the i-th from rank i."""
        if self.size == 1:
            return Pending(None, lambda: parts)
        out, arrived = parts.contiguous(), torch.empty_like(parts, memory_format=torch.contiguous_format)
        if self._native is not None:
            return Pending(self._native.alltoall_base(arrived, out, [], []), lambda: arrived)
        return Pending(self._exchange(out, arrived), lambda: arrived)

    def _exchange(self, out: Sequence[Tensor] | Tensor, into: Tensor) -> "Waitable":
        """The i-th of `out` for rank i, the i-th of `into` from rank i; receives first.

        gloo's all-gather and all-to-all post sends first. A receive is announced in the same stream as what is sent, so
        that between two ranks that don't start at once it waits behind the data: first one direction, then the other.
        """
        assert self.group is not None
        into[self.place] = out[self.place]
        if not into.numel():
            return Transfers([])
        steps = range(1, self.size)  # each begins with a neighbour, so that nobody is everybody's first
        before, behind = ([(self.place + sign * step) % self.size for step in steps] for sign in (-1, 1))
        works = [self.group.recv([into[peer]], peer, 0) for peer in before]
        works += [self.group.send([out[peer]], peer, 0) for peer in behind]
        return Transfers(works)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """The sum over all; `tensor` is overwritten."""
        if self.group is None:
            return Pending(None, lambda: tensor)
        return Pending(self.group.allreduce([tensor]), lambda: tensor)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """The largest of all; `tensor` is overwritten."""
        if self.group is None:
            return Pending(None, lambda: tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return Pending(self.group.allreduce([tensor], options), lambda: tensor)

    def broadcast(self, tensor: Tensor, source: int) -> Pending:
        """What the rank at place `source` has; `tensor` is overwritten."""
        if self.group is None:
            return Pending(None, lambda: tensor)
        return Pending(self.group.broadcast(tensor, source), lambda: tensor)

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        """The sum over all, at place `target`; `tensor` is overwritten."""
        if self.group is None:
            return Pending(None, lambda: tensor)
        return Pending(self.group.reduce(tensor, target), lambda: tensor)


class _GoneGroup:
    """Stands for the process group of a pickled axis."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # what copy and pickle ask of every object
        raise UnsupportedError(
            "this layer was pickled while it was spread over the ranks of a cube: the copy holds one rank's part of "
            "the weights, and can't compute with it. Build the model anew, and load a checkpoint."
        )


MakeGroup = Callable[[str], "dist.ProcessGroup | None"]
"""This rank's group along the axes named; None where it would hold one rank."""


class Mesh:
    """This rank's place in a grid of any sizes, and its axes.

    Args:
        sizes: of x, y and z.
        place: this rank's coordinates.
        axes: by name, as in `PLANES`.
    """

    def __init__(self, sizes: tuple[int, int, int], place: tuple[int, int, int], axes: Mapping[str, MeshAxis]) -> None:
        self.sizes = sizes
        self.place = place
        self._axes = dict(axes)

    @staticmethod
    def of(sizes: tuple[int, int, int], rank: int, make_group: MakeGroup, axis: type[MeshAxis] = MeshAxis) -> "Mesh":
        """The grid as the `rank`-th of its ranks sees it; all of them make their groups in the same order."""
        place = Topology(cube=sizes).coordinates(rank)[2:]
        assert len(place) == 3
        axes = {}
        for names in PLANES:
            count, where = 1, 0
            for name in names:
                size = sizes["xyz".index(name)]
                count, where = count * size, where * size + place["xyz".index(name)]
            axes[names] = axis(make_group(names) if count > 1 else None, count, where)
        return Mesh(sizes, (place[0], place[1], place[2]), axes)

    @staticmethod
    def create(sizes: tuple[int, int, int], axis: type[MeshAxis] = MeshAxis) -> "Mesh":
        """A grid of all ranks of the world. Called by all of them.

        Raises:
            HanayoError: there are more or fewer.
        """
        world = dist.get_world_size()
        if prod(sizes) != world:
            raise HanayoError(f"the grid {sizes} has {prod(sizes)} ranks, but there are {world} processes")
        topology, rank = Topology(cube=sizes), dist.get_rank()

        def make(names: str) -> dist.ProcessGroup:
            group: dist.ProcessGroup
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in topology.groups(*names)])
            return group

        return Mesh.of(sizes, rank, make, axis)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes)

    def axis(self, names: str) -> MeshAxis:
        """The axis `names`, as "y", or several as one, as "yz": the last one runs fastest."""
        return self._axes[names]

    def size(self, names: str) -> int:
        """How many ranks lie along `names`, in any order; 1 for none."""
        return prod(self.sizes["xyz".index(name)] for name in names)

    def index(self, names: str, place: Sequence[int] | None = None) -> int:
        """The place along `names` (of this rank, or of another's `place`), the last one running fastest."""
        where = 0
        for name in names:
            i = "xyz".index(name)
            where = where * self.sizes[i] + (self.place if place is None else place)[i]
        return where
