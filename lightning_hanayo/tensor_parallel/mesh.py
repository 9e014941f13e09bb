"""The 3-D mesh: the ranks that hold one copy of a layer together, and the collectives along its axes.

x, y, z = 2, 2, 2        rank = (x * 2 + y) * 2 + z

        z=0   z=1
  y=0    0     1      x = 0            axis "z" of rank 1: 0, 1        axis "yz" of rank 1: 0, 1, 2, 3
  y=1    2     3                       axis "x" of rank 1: 1, 5
  y=0    4     5      x = 1
  y=1    6     7
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.overlap.link_queue import LinkQueue, Work
from lightning_hanayo.topology import Topology

AXIS_NAMES = ("x", "y", "z", "xy", "xz", "yz", "xyz")
"""the axes that a collective runs along: one alone, or several taken as one"""


_SUM = dist.ReduceScatterOptions()
_PICKLED = (
    "this layer was pickled while its weights were sharded over the ranks of a cube. The copy holds one "
    "rank's shard, and can't compute with it. Build the model anew, and load a checkpoint."
)


T = TypeVar("T")


class Pending(Generic[T]):
    """A collective under way. Do not touch its operands before `wait()` returns."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Work | None, finish: Callable[[], T]) -> None:
        self._work = work
        self._finish = finish

    @staticmethod
    def done(result: T) -> "Pending[T]":
        """Returns one that needs no communication."""
        return Pending(None, lambda: result)

    def wait(self) -> T:
        """Block until the collective has ended, and return its result."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._finish()


@dataclass
class Transfers:
    """Several transfers under way, which are waited for as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        """Block until all of them have ended."""
        for work in self.works:
            work.wait()


@dataclass(eq=False)
class MeshAxis:
    """The ranks that differ along one axis of a mesh, or along several taken as one. At size 1 nothing is sent.

    All ranks of the axis call each method, in the same order. A method starts a collective and returns at once.
    """

    group: dist.ProcessGroup | None
    """of these ranks; None if there is only one"""
    size: int
    """the number of ranks"""
    rank: int
    """this rank's number among them"""
    queue: LinkQueue | None = None
    """puts this rank's collectives on the wire, one at a time; None: each starts at once"""
    tag: int = 0
    """tells gathers and all-to-alls over gloo from those of other axes with the same group"""
    what: str = "a collective of its cube"
    """the collectives, as a report names them while a rank waits for one"""

    def __post_init__(self) -> None:
        group = self.group
        self.ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        self._native = group if group is not None and dist.get_backend(group) != "gloo" else None
        """the group, unless its backend is gloo, whose collectives this class replaces by faster ones"""

    def __getstate__(self) -> dict[str, Any]:
        """A process group can't leave its process: a pickled axis keeps its size, but reaches no other rank."""
        lost = _LostGroup(_PICKLED) if self.size > 1 else None
        return {"size": self.size, "rank": self.rank, "queue": None, "group": lost, "_native": lost}

    def disconnect(self, reason: str) -> None:
        """Drop the process group; every use of it is an error with this reason."""
        lost: Any = _LostGroup(reason) if self.size > 1 else None
        self.group = self._native = lost

    def all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        """[...] on each rank to [size, ...] on all of them."""
        if self.size == 1:
            return Pending.done(tensor.unsqueeze(0))
        whole = tensor.new_empty(self.size, *tensor.shape)
        return Pending(self.gather_into([whole], [tensor]), lambda: whole)

    def gather_into(self, wholes: Sequence[Tensor], tensors: Sequence[Tensor]) -> Work:
        """Start to gather each of `tensors` into one of `wholes`, contiguous and `size` times as large: one collective.

        The size must be larger than 1.
        """
        own = [tensor.contiguous() for tensor in tensors]
        if self._native is None:
            pairs = zip(wholes, own, strict=True)
            return self._exchange([([one] * self.size, whole.view(self.size, *one.shape)) for whole, one in pairs])
        native = self._native
        if len(own) == 1:
            return self._start(lambda: native._allgather_base(wholes[0], own[0]))
        return self._start(lambda: native.allgather_into_tensor_coalesced(list(wholes), own))

    def reduce_scatter(self, parts: Tensor) -> Pending[Tensor]:
        """[size, ...] on each rank to [...]: this rank's part of the sum over all ranks."""
        pending = self.reduce_scatter_each([parts])
        return Pending(None, lambda: pending.wait()[0])

    def reduce_scatter_each(self, parts: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """The same for several tensors in one collective.

        gloo's own reduce-scatter sends everything twice, so over gloo an all-to-all brings each rank the parts to sum.
        """
        if self.size == 1:
            return Pending.done([one.squeeze(0) for one in parts])
        native = self._native
        if native is None:
            sent = [one.contiguous() for one in parts]
            received = [torch.empty_like(one) for one in sent]
            works = self._exchange(list(zip(sent, received, strict=True)))
            return Pending(works, lambda: [one.sum(0) for one in received])
        whole = [one.contiguous().flatten(0, 1) for one in parts]
        own = [one.new_empty(one.shape[1:]) for one in parts]
        if len(own) == 1:
            return Pending(self._start(lambda: native._reduce_scatter_base(own[0], whole[0], _SUM)), lambda: own)
        return Pending(self._start(lambda: native.reduce_scatter_tensor_coalesced(own, whole, _SUM)), lambda: own)

    def all_to_all(self, parts: Tensor) -> Pending[Tensor]:
        """[size, ...], whose i-th part goes to rank i, to [size, ...], whose i-th part came from rank i."""
        return self.exchange_rows(parts, [1] * self.size, [1] * self.size)

    def exchange_rows(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[Tensor]:
        """[sum(sent), ...], whose rows go to rank 0, rank 1, ..., to [sum(received), ...], by the ranks they came from.

        `sent` has the rows for each rank, `received` those from each.
        """
        if self.size == 1:
            return Pending.done(tensor)
        out, into = tensor.contiguous(), tensor.new_empty(sum(received), *tensor.shape[1:])
        native = self._native
        if native is not None:
            work = self._start(lambda: native.alltoall_base(into, out, list(received), list(sent)))
            return Pending(work, lambda: into)
        return Pending(self._exchange([(out.split(list(sent)), into.split(list(received)))]), lambda: into)

    def _start(self, post: Callable[[], Work]) -> Work:
        return _Started(post() if self.queue is None else self.queue.start(post), self)

    def _exchange(self, exchanges: Sequence[tuple[Sequence[Tensor] | Tensor, Sequence[Tensor] | Tensor]]) -> Work:
        """Start to send and receive pairs of (sent, received) tensors: one collective."""
        for out, into in exchanges:
            into[self.rank].copy_(out[self.rank])
        return self._start(lambda: Transfers([work for pair in exchanges for work in self._send_and_receive(*pair)]))

    def _send_and_receive(self, out: Sequence[Tensor] | Tensor, into: Sequence[Tensor] | Tensor) -> Iterator[Work]:
        """Send `out[i]` to rank i and receive `into[i]` from it, unless they are empty. Receives are posted first.

        gloo's own all-gather and all-to-all post sends first. A receive is announced in the same stream as the data
        that is sent. If two ranks don't start at the same time, it waits behind that data, and the two directions
        follow one another instead of overlapping.
        """
        assert self.group is not None
        steps = range(1, self.size)  # from its neighbour on, so that no rank is the first peer of all others
        sources, targets = ([(self.rank + sign * step) % self.size for step in steps] for sign in (-1, 1))
        yield from (self.group.recv([into[peer]], peer, self.tag) for peer in sources if into[peer].numel())
        yield from (self.group.send([out[peer]], peer, self.tag) for peer in targets if out[peer].numel())

    def all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending[Tensor]:
        """The sum over all ranks, or `dist.ReduceOp.MAX`, the largest of each entry. `tensor` is overwritten."""
        group = self.group
        if group is None:
            return Pending.done(tensor)
        return Pending(self._start(lambda: group.allreduce([tensor], operation)), lambda: tensor)


class _Started(NamedTuple):
    """A collective along an axis, under way."""

    work: Work
    axis: MeshAxis

    def wait(self) -> None:
        """Block until it has ended, and state that this rank waits for it."""
        with Waiting(self.axis.what, self.axis.ranks):
            self.work.wait()


class _LostGroup(NamedTuple):
    """Takes the place of a process group that can't be used any more: every use of it is an error."""

    reason: str

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # copy and pickle look these up on every object
        raise UnsupportedError(self.reason)


MakeGroup = Callable[[str], "dist.ProcessGroup | None"]
"""returns this rank's process group along the axes named; None where it would hold one rank"""


class Mesh:
    """A 3-D mesh of ranks as one of them sees it: its sizes, this rank's coordinates, and the axes.

    All ranks make theirs, and their groups, in the same order. Without a `control` group the one of all axes takes its
    place: then it must carry tensors in host memory.

    Args:
        sizes: the number of ranks along x, y and z.
        rank: this rank's number.
        make_group: is called for each of `AXIS_NAMES` along which there are several ranks.
        axis: the class of axes.
        control: of all ranks, for tensors in host memory (gloo).
        queue: through which all collectives go; None: there is none.
    """

    def __init__(
        self,
        sizes: MeshSizes,
        rank: int,
        make_group: MakeGroup,
        axis: type[MeshAxis] = MeshAxis,
        control: dist.ProcessGroup | None = None,
        queue: LinkQueue | None = None,
    ) -> None:
        self.sizes = sizes
        self.coordinates = Topology(cube=sizes).coordinates(rank)[2:]
        self._axes: dict[str, MeshAxis] = {}
        self._unqueued: dict[str, MeshAxis] = {}
        for names in AXIS_NAMES:
            group = make_group(names) if self.size(names) > 1 else None
            self._axes[names] = axis(group, self.size(names), self.index(names), queue=queue)
            if queue is not None:
                self._unqueued[names] = MeshAxis(group, self.size(names), self.index(names), tag=1)
        self._control = self._axes["xyz"] if control is None else MeshAxis(control, prod(sizes), rank, queue)

    @staticmethod
    def create(sizes: MeshSizes, axis: type[MeshAxis] = MeshAxis, queue: LinkQueue | None = None) -> "Mesh":
        """Returns a mesh of all ranks of the initialized default process group. All of them call it.

        All collectives go through the `queue`, if there is one.

        Example:
            >>> torch.distributed.init_process_group("gloo")
            >>> mesh = Mesh.create((1, 2, 2))

        Raises:
            HanayoError: the mesh has more or fewer ranks than there are processes.
        """
        world = dist.get_world_size()
        if prod(sizes) != world:
            raise HanayoError(f"the mesh {sizes} has {prod(sizes)} ranks, but there are {world} processes")
        topology, rank = Topology(cube=sizes), dist.get_rank()

        def make(names: str) -> dist.ProcessGroup:
            group: dist.ProcessGroup
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in topology.groups(*names)])
            return group

        control = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None
        return Mesh(sizes, rank, make, axis, control, queue)

    @staticmethod
    def single() -> "Mesh":
        """Returns the mesh of one rank, which needs no process group."""
        return Mesh((1, 1, 1), 0, lambda names: None)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """The coordinates of all ranks, in their order."""
        x, y, z = map(range, self.sizes)
        return list(product(x, y, z))

    def axis(self, names: str) -> MeshAxis:
        """Returns the axis `names`, as "y", or several taken as one, as "yz", of which the last one runs fastest."""
        return self._axes[names]

    def unqueued_axis(self, names: str) -> MeshAxis:
        """Returns the axis `names` for gathers and all-to-alls that an action may start or not, as its data say.

        They don't go through the queue, whose order all ranks must share: only the ranks of this axis must agree.
        """
        return self._unqueued.get(names, self._axes[names])

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Returns the largest of each number over all ranks, which call this. Waits for hosts, not for devices."""
        if self.num_ranks == 1:
            return list(numbers)
        return self._control.all_reduce(torch.tensor(numbers, dtype=torch.int64), dist.ReduceOp.MAX).wait().tolist()

    def disconnect(self, reason: str) -> None:
        """Drop the process groups of all axes; every use of them is an error with this reason."""
        for axis in (*self._axes.values(), *self._unqueued.values(), self._control):
            axis.disconnect(reason)

    def size(self, names: str) -> int:
        """Returns how many ranks there are along `names`, in any order; 1 for none."""
        return prod(self.sizes["xyz".index(name)] for name in names)

    def index(self, names: str, coordinates: Sequence[int] | None = None) -> int:
        """Returns the index along `names`, the last one running fastest, of this rank or of one at `coordinates`."""
        coordinates = self.coordinates if coordinates is None else coordinates
        index = 0
        for name in names:
            index = index * self.size(name) + coordinates["xyz".index(name)]
        return index
