"""The process groups of a topology that one rank belongs to, and the collectives over them.

A factory makes one rank's groups, a whole partition of the world at a time:

    partition of 4 ranks along "data"        rank 0 gets 0, 2        made by one call on all ranks, in one order,
    ((0, 2), (1, 3))                         rank 1 gets 1, 3        so that no rank waits for a group that others skip

There are two kinds: control groups carry tensors of the CPU and Python objects, always over gloo; tensor groups carry
tensors of the run's device. On a CPU they are two groups, too: messages of the one have tags that mean others in the
other. On GPUs each partition of tensor groups is split off in one call (`NativeGroups`):

world (cpu:gloo, cuda:nccl, bound to this rank's device)
|-- native world (nccl)          the others are split off from its communicator
|   |-- data, cube, channel ...  one `split_group` per partition: one call of ncclCommSplit on every rank
|-- control ...                  gloo, made by their members

`Channels` are tensor groups of two pipeline ranks between which a schedule sends messages.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import Backend, distributed_c10d
from typing_extensions import override

from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.overlap.link_queue import DeviceLink, LinkQueue
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.topology import Topology

Partition = tuple[tuple[int, ...], ...]
"""the groups of ranks into which the world is divided: each rank is in one of them"""

_Kind = Literal["control", "background", "tensors", "up", "down"]


@dataclass(frozen=True)
class GroupSettings:
    """The purpose of a tensor group, and how NCCL shall run it."""

    name: str
    """in messages of torch and NCCL"""
    high_priority: bool = False
    """whether its kernels start before those of the model that are waiting for the device"""
    max_ctas: int | None = None
    """on how many streaming multiprocessors its kernels run at most; None: as many as NCCL chooses"""


CHANNEL = GroupSettings("channel", high_priority=True, max_ctas=4)
"""A receive is posted long before its message comes. Until then its kernel spins: on few multiprocessors, so that
matrix products keep the others. Buffers are per multiprocessor, too."""
CUBE = GroupSettings("cube", high_priority=True)
"""The next product waits for these collectives."""
DATA = GroupSettings("data")
"""Gradients are reduced while the backward goes on, which comes first."""
REPLICA = GroupSettings("replica", max_ctas=1)
"""Norms of gradients: one number for each parameter."""


ABORT_WITHIN = 5.0
"""seconds after which a rank that has failed goes on, whether or not its groups have ended"""


class GroupFactory:
    """Makes process groups over gloo. All ranks of the world call a method with the same arguments, in the same order.

    A rank takes part in its own group of a partition only: with 128 pipelines that is one rendezvous instead of 128. A
    rank waits for the members of its group, and no other. All ranks make the same partitions in the same order, so the
    rank that is the furthest behind has nobody to wait for: it can't hang.

    Args:
        device: this rank's.
        timeout: how long a transfer may take.
    """

    is_native = False
    """whether tensor groups run on the device itself: they have collectives of their own, and need channels"""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.timeout = timeout
        self.agree_on_names()
        self._world = dist.group.WORLD
        self._tensor_groups: list[dist.ProcessGroup] = []
        self._aborting, self._is_aborted = threading.Lock(), False
        self._made: dict[tuple[_Kind, Partition], dist.ProcessGroup] = {}

    @property
    def is_open(self) -> bool:
        """Whether the world in which the groups were made still exists."""
        return self._world is dist.group.WORLD and not self._is_aborted

    def agree_on_names(self) -> None:
        """Called by all ranks before they make groups, if user code may have made some since the last time.

        torch (2.10 to 2.13) names a group that only its members make after their ranks and the number of groups that
        this process has. Where a user's groups make these numbers differ, all ranks take part in all groups, which are
        counted.
        """
        world = dist.group.WORLD
        assert world is not None
        numbers = all_gather_objects(world, len(distributed_c10d._world.pg_names))
        self._members_only = len(set(numbers)) == 1

    def forget_control(self) -> None:
        """Let the next Trainer have control groups of its own.

        A failed rank wakes those that wait for it over gloo by dropping its groups, which nobody else may hold.
        """
        self._made = {key: group for key, group in self._made.items() if key[0] not in ("control", "background")}

    def control(self, partition: Partition) -> dist.ProcessGroup:
        """This rank's control group; the one that was made before, if the partition is the same."""
        return self._once("control", partition, lambda: self._make(partition, "gloo", "control"))

    def background(self, partition: Partition) -> dist.ProcessGroup:
        """A second control group, for a thread that works while this rank's other threads use the first."""
        return self._once("background", partition, lambda: self._make(partition, "gloo", "control"))

    def tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        """This rank's tensor group; the one that was made before, if the partition is the same.

        Its ranks are connected: NCCL does that in the first collective, which blocks each rank until all are there.
        """

        def connected() -> dist.ProcessGroup:
            group = self._new_tensors(partition, settings)
            if self.is_native:
                with Waiting("the first collective of a group", tuple(dist.get_process_group_ranks(group))):
                    group.allreduce([torch.zeros(1, device=self.device)]).wait()
            return group

        return self._once("tensors", partition, connected)

    def channel(self, partition: Partition, direction: Literal["up", "down"]) -> dist.ProcessGroup:
        """This rank's tensor group for messages in one direction: to the higher ranks, or to the lower ones."""
        return self._once(direction, partition, lambda: self._new_tensors(partition, CHANNEL))

    def abort(self) -> None:
        """After a failure: end all transfers in native groups, which can't be used afterwards. From any thread.

        All at once: to abort one communicator may wait for the device, where kernels of the others wait for messages
        that never come (https://github.com/pytorch/pytorch/issues/119797).
        """
        with self._aborting:
            if self._is_aborted:
                return
            self._is_aborted = True
            threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in self._native_groups()]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + ABORT_WITHIN
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _native_groups(self) -> Sequence[dist.ProcessGroup]:
        world = dist.group.WORLD  # has a communicator, too: barriers and decisions of all ranks use it
        groups = self._tensor_groups if world is None else [world, *self._tensor_groups]
        return groups if self.is_native else ()

    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        return self._make(partition, "gloo", settings.name)

    def _make(self, partition: Partition, backend: str, name: str, options: Any = None) -> dist.ProcessGroup:
        """Make the groups of the partition by `dist.new_group`, and return this rank's."""
        rank = dist.get_rank()
        own: dist.ProcessGroup | None = None
        for ranks in partition:
            if rank in ranks or not self._members_only:
                group = dist.new_group(
                    list(ranks),
                    timeout=self.timeout,
                    backend=backend,
                    pg_options=options,
                    use_local_synchronization=self._members_only,
                    group_desc=f"hanayo {name}",
                )
                own = group if rank in ranks else own
        assert own is not None, f"rank {rank} is in no group of {name}"
        return own

    def _new_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        group = self._make_tensors(partition, settings)
        self._tensor_groups.append(group)
        return group

    def _once(self, kind: _Kind, partition: Partition, make: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        key = kind, partition
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # it took longer than a transfer may; the first error is shown, not its consequences
        group.abort()


def covering(groups: Partition, world_size: int) -> Partition:
    """A partition with these groups: the other ranks are groups of one."""
    held = {rank for ranks in groups for rank in ranks}
    return (*groups, *((rank,) for rank in range(world_size) if rank not in held))


Pair = tuple[int, int]
"""the sender and the receiver, by pipeline rank"""


def matchings(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """The unordered pairs, in as few sets as a simple rule finds in which no rank is twice.

    Example:
        >>> matchings([(0, 1), (1, 0), (1, 2), (2, 3)])
        (((0, 1), (2, 3)), ((1, 2),))
    """
    sets: dict[int, list[Pair]] = {}
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        free = next(i for i in count() if not {low, high} & {rank for pair in sets.get(i, ()) for rank in pair})
        sets.setdefault(free, []).append((low, high))
    return tuple(tuple(sets[i]) for i in sorted(sets))


class Channels:
    """The channels of one rank's pipeline; none where groups aren't native, since gloo tells messages apart by tags.

    A pair is one channel, and its two directions are two: NCCL runs the transfers of one communicator in the order in
    which they were posted, so that a receive that is posted early would hold up a send. Pairs without a rank in common
    are one partition, and so one call of the factory:

        a wave over 4 ranks      0 -- 1 -- 2 -- 3       two partitions: 0-1, 2-3 and 1-2 (0 and 3 are alone in it)
        a loop over 4 ranks      ... and 3 -- 0         the same two: 3-0 fits to 1-2

    Args:
        factory: makes the groups.
        pipelines: the global ranks of every pipeline of the world, in pipeline order.
        rank: this process's global rank.
    """

    def __init__(self, factory: GroupFactory, pipelines: Partition, rank: int) -> None:
        self._factory = factory
        self._pipelines = pipelines
        self._rank = rank
        self._groups: dict[Pair, dist.ProcessGroup] = {}
        self._known: set[Pair] = set()

    def connect(self, pairs: Iterable[Pair]) -> Mapping[Pair, dist.ProcessGroup]:
        """The channels of this rank, once those between `pairs` exist. Called by all ranks of the world alike.

        Both directions of a pair are made; those that an earlier run has made are used again.
        """
        wanted = {(min(pair), max(pair)) for pair in pairs} - self._known
        if self._factory.is_native and wanted:
            self._known |= wanted
            self._factory.agree_on_names()
            for matching in matchings(wanted):  # in the same order on all ranks
                self._make(matching)
                self._make(tuple((high, low) for low, high in matching))
        return self._groups

    def _make(self, channels: tuple[Pair, ...]) -> None:
        """Make channels without a rank in common, and send something over each.

        NCCL connects two ranks when they first send, and blocks both until they do. In a batch, whose ranks come to
        their first messages in any order, that can be a circle. Here a rank has one partner at a time, and all ranks
        have the same order, so the rank that is the furthest behind has nobody to wait for.
        """
        ranks = [(ranks[sender], ranks[receiver]) for ranks in self._pipelines for sender, receiver in channels]
        world_size = sum(map(len, self._pipelines))
        partition = covering(tuple((min(pair), max(pair)) for pair in ranks), world_size)
        group = self._factory.channel(partition, "up" if channels[0][0] < channels[0][1] else "down")
        pipeline = next(ranks for ranks in self._pipelines if self._rank in ranks)
        place = pipeline.index(self._rank)
        for sender, receiver in channels:
            if place in (sender, receiver):
                self._groups[sender, receiver] = group
                self._send_once(group, is_sender=place == sender)

    def _send_once(self, group: dist.ProcessGroup, *, is_sender: bool) -> None:
        value, peer = torch.zeros(1, device=self._factory.device), 1 - group.rank()
        with Waiting("the first use of a channel", tuple(dist.get_process_group_ranks(group))):
            (group.send if is_sender else group.recv)([value], peer, 0).wait()


PARTIAL_AXES = ("x", "xy", "xz", "xyz")
"""the axes over which gradients of 3-D layers are still to be summed after a batch"""


@dataclass(frozen=True)
class CubeGroups:
    """The ranks that hold each stage together: their mesh, and gloo groups for Python objects."""

    mesh: Mesh
    plane: dist.ProcessGroup
    """the ranks that differ along y and z"""
    whole: dist.ProcessGroup
    queue: LinkQueue | None = None
    """through which the mesh's collectives go, if two actions may run at once"""


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups. `data`, `data_control` and `cube` are None where they would hold one rank.

    `control`, `data_control`, `replica`, `cube.plane` and `cube.whole` carry tensors of the CPU (gloo).
    """

    factory: GroupFactory
    pipe_ranks: tuple[int, ...]
    control: dist.ProcessGroup
    channels: Channels
    data: dist.ProcessGroup | None
    data_control: dist.ProcessGroup | None
    metrics: dist.ProcessGroup
    """over which torchmetrics syncs: all ranks that run steps, or this one alone (None would mean the world)"""
    replica_ranks: tuple[int, ...]
    """all ranks that train one copy of the model: pipeline and cube"""
    replica: dist.ProcessGroup
    replica_tensors: dist.ProcessGroup
    """the same ranks, for tensors of the device"""
    cube: CubeGroups | None
    gradient_groups: dict[str, dist.ProcessGroup]
    """for gradients that are partial over these axes of the cube: the ranks, data ranks too, that sum them"""

    @staticmethod
    def create(topology: Topology, rank: int, factory: GroupFactory, *, pairs: bool = False) -> "ProcessGroups":
        """Create all groups. Called by all ranks of the world alike.

        Equal groups are one: without a cube `replica` is `control`, and `metrics` is `data`.

        Args:
            topology: the ranks.
            rank: this one.
            factory: makes the groups.
            pairs: whether a rank may run two actions at once.
        """

        def control(*axes: str) -> dist.ProcessGroup:
            return factory.control(topology.groups(*axes))

        def tensors(settings: GroupSettings, *axes: str) -> dist.ProcessGroup:
            return factory.tensors(topology.groups(*axes), settings)

        replicates = topology.data > 1
        is_cube = prod(topology.cube) > 1
        cube, gradient_groups = None, {}
        if is_cube:
            whole, place = control("x", "y", "z"), rank % prod(topology.cube)
            queue = (DeviceLink if factory.is_native else LinkQueue)() if pairs else None
            mesh = Mesh(topology.cube, place, lambda axes: tensors(CUBE, *axes), control=whole, queue=queue)
            cube = CubeGroups(mesh, control("y", "z"), whole, queue)
            if replicates:
                partial = [axes for axes in PARTIAL_AXES if mesh.size(axes) > 1]
                gradient_groups = {axes: tensors(DATA, "data", *axes) for axes in partial}
        return ProcessGroups(
            factory,
            topology.group_of(rank, "pipe"),
            control("pipe"),
            Channels(factory, topology.groups("pipe"), rank),
            tensors(DATA, "data") if replicates else None,
            control("data") if replicates else None,
            tensors(DATA, "data", *"xyz"),
            topology.group_of(rank, "pipe", "x", "y", "z"),
            control("pipe", "x", "y", "z"),
            tensors(REPLICA, "pipe", "x", "y", "z"),
            cube,
            gradient_groups,
        )

    def summing(self, partial_axes: str) -> dist.ProcessGroup | None:
        """The group that sums a gradient which is partial over these axes of the cube; None: this rank has it whole."""
        if self.cube is None or self.cube.mesh.size(partial_axes) == 1:
            return self.data
        if self.data is not None:
            return self.gradient_groups[partial_axes]
        return self.cube.mesh.axis(partial_axes).group


def broadcast_bytes(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Give all ranks of the group the values of rank `source`, in place; None: the world. The tensor is contiguous.

    They are sent as bytes: gloo knows neither complex numbers (rotary positions) nor 16-bit integers.
    """
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=source)


def broadcast_values(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Give all ranks of the world rank 0's values, as if the model had been built once.

    They pass over `device`, one tensor at a time, wherever they are stored: links of GPUs are faster.
    """
    for tensor in tensors:
        whole = tensor.detach().to(device).contiguous()
        broadcast_bytes(whole)
        tensor.detach().copy_(whole)


class AllGather(torch.autograd.Function):
    """[...] of each rank of a group to [ranks, ...]; a rank's gradient is the sum of all ranks' gradients of it.

    torch's own (2.13) is deprecated, and its backward over gloo mistakes ranks of a group for ranks of the world.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, before_backward: Callable[[], object] = int
    ) -> torch.Tensor:
        """Called by all ranks of the group, with tensors of one shape. `before_backward` is called in the backward."""
        ctx.group, ctx.before_backward = group, before_backward
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Called by all ranks of the group."""
        ctx.before_backward()
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None, None


_NCCL = "nccl"


_native: "dict[tuple[torch.device, timedelta], NativeGroups]" = {}
"""of this process's world, which keeps all groups: Trainers share those on the GPU, whose buffers are large"""


def group_factory(device: torch.device, timeout: timedelta) -> GroupFactory:
    """The factory for a Trainer's runs on this device. Called by all ranks of the world, which is initialized."""
    if device.type == "cpu":
        return GroupFactory(device, timeout)
    factory = _native.get((device, timeout))
    if factory is None or not factory.is_open:
        factory = _native[device, timeout] = NativeGroups(device, timeout)
        return factory
    factory.forget_control()
    factory.agree_on_names()
    return factory


def forget_groups() -> None:
    """Drop all groups, after a failure."""
    _native.clear()


def backend_for(device: torch.device) -> str:
    """The backends to initialize: with a GPU also gloo, since models are broadcast while they are on the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{_native_backend(device)}"


class NativeGroups(GroupFactory):
    """On GPUs. Where NCCL can't split (an older NCCL, a world that isn't bound to a device, another kind of device),
    groups are made one by one by their members.

    torch's `split_group` splits all backends of the parent, so the parent is a group over NCCL alone.
    """

    is_native = True

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        super().__init__(device, timeout)
        self._backend = _native_backend(device)
        self._parent: dist.ProcessGroup | None = None
        if _can_split(device):
            options, name = nccl_options(DATA, timeout), "hanayo native world"
            self._parent = dist.new_group(backend=self._backend, timeout=timeout, pg_options=options, group_desc=name)
            self._tensor_groups.append(self._parent)

    @override
    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        options = nccl_options(settings, self.timeout) if self._backend == _NCCL else None
        group: dist.ProcessGroup | None
        if self._parent is None:
            group = self._make(partition, self._backend, settings.name, options)
        else:
            group = dist.split_group(
                self._parent,
                [list(ranks) for ranks in partition],
                timeout=self.timeout,
                pg_options=options,
                group_desc=f"hanayo {settings.name}",
            )
        assert group is not None, f"rank {dist.get_rank()} is in no group of {settings.name}"
        return group


def nccl_options(settings: GroupSettings, timeout: timedelta) -> Any:
    """NCCL's options for a group with these settings. Torch for CPUs doesn't have the class."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.high_priority)
    options._timeout = timeout  # else torch warns that its default isn't that of `new_group`
    if settings.max_ctas is not None:
        options.config.max_ctas = settings.max_ctas
    return options


def _native_backend(device: torch.device) -> str:
    return Backend.default_device_backend_map[device.type]


def _can_split(device: torch.device) -> bool:
    """Whether the world's communicator exists already, and NCCL can split it."""
    world = dist.group.WORLD
    assert world is not None
    if world.bound_device_id is None or _native_backend(device) != _NCCL:
        return False
    return bool(world._get_backend(device).supports_splitting)
