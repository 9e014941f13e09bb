"""The group factory: makes one rank's process groups, a whole partition of the world at a time.

    partition of 4 ranks along "data"        rank 0 gets 0, 2        made by one call on all ranks, in one order,
    ((0, 2), (1, 3))                         rank 1 gets 1, 3        so that no rank waits for a group that others skip

Two kinds: control groups carry tensors of the CPU and Python objects, always over gloo; tensor groups carry tensors of
the run's device. On a CPU they are two groups, too: messages of the one have tags that mean others in the other.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects

Partition = tuple[tuple[int, ...], ...]
"""the groups of ranks into which the world is divided: each rank is in one of them"""

_Kind = Literal["control", "background", "tensors", "up", "down"]


@dataclass(frozen=True)
class GroupSettings:
    """What a tensor group is for, and how NCCL shall run it."""

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


class GroupFactory(ABC):
    """Makes process groups. All ranks of the world call a method with the same arguments, in the same order.

    Args:
        device: this rank's.
        timeout: how long a transfer may take.
    """

    is_native: bool
    """whether tensor groups run on the device itself: they have collectives of their own, and need channels"""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self.timeout = timeout
        self._make = GroupMaker()
        self._world = dist.group.WORLD
        self._tensor_groups: list[dist.ProcessGroup] = []
        self._aborting, self._is_aborted = threading.Lock(), False
        self._made: dict[tuple[_Kind, Partition], dist.ProcessGroup] = {}

    @property
    def is_open(self) -> bool:
        """Whether the world in which the groups were made still exists."""
        return self._world is dist.group.WORLD and not self._is_aborted

    def agree_on_names(self) -> None:
        """Called by all ranks before they make groups, if user code may have made some since the last time."""
        self._make.agree_on_names()

    def forget_control(self) -> None:
        """Let the next Trainer have control groups of its own.

        A failed rank wakes those that wait for it over gloo by dropping its groups, which nobody else may hold.
        """
        self._made = {key: group for key, group in self._made.items() if key[0] not in ("control", "background")}

    def control(self, partition: Partition) -> dist.ProcessGroup:
        """This rank's control group; the one that was made before, if the partition is the same."""
        return self._once("control", partition, lambda: self._make_control(partition))

    def background(self, partition: Partition) -> dist.ProcessGroup:
        """A second control group, for a thread that works while this rank's other threads use the first."""
        return self._once("background", partition, lambda: self._make_control(partition))

    def tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        """This rank's tensor group; the one that was made before, if the partition is the same.

        Its ranks are connected: NCCL does that in the first collective, which blocks each rank until all are there.
        """
        return self._once("tensors", partition, lambda: self._make_connected(partition, settings))

    def channel(self, partition: Partition, direction: Literal["up", "down"]) -> dist.ProcessGroup:
        """This rank's tensor group for messages in one direction: to the higher ranks, or to the lower ones."""
        return self._once(direction, partition, lambda: self._new_tensors(partition, CHANNEL))

    def abort(self) -> None:
        """After a failure: end what is under way in native groups, which can't be used afterwards. From any thread.

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
        return self._tensor_groups if self.is_native else ()

    @abstractmethod
    def _make_control(self, partition: Partition) -> dist.ProcessGroup: ...

    @abstractmethod
    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup: ...

    def _make_connected(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        group = self._new_tensors(partition, settings)
        if self.is_native:
            with Waiting("the first collective of a group", tuple(dist.get_process_group_ranks(group))):
                group.allreduce([torch.zeros(1, device=self.device)]).wait()
        return group

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


class GlooGroups(GroupFactory):
    """On CPUs: all groups are over gloo."""

    is_native = False

    @override
    def _make_control(self, partition: Partition) -> dist.ProcessGroup:
        return self._make(partition, "gloo", "control", self.timeout)

    @override
    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        return self._make(partition, "gloo", settings.name, self.timeout)


class GroupMaker:
    """Makes a partition's groups by `dist.new_group`. Made by all ranks of the world together.

    A rank takes part in its own group only: with 128 pipelines that is one rendezvous instead of 128. A rank waits for
    the members of its group, and no other. All ranks make the same partitions in the same order, so the rank that is
    the furthest behind has nobody to wait for: it can't hang.

    torch (2.10 to 2.13) names a group that only its members make after their ranks and the number of groups that this
    process has. Where a user's groups make these numbers differ, all ranks take part in all groups, which are counted.
    """

    def __init__(self) -> None:
        self.agree_on_names()

    def agree_on_names(self) -> None:
        """Compare the numbers of groups of all ranks."""
        world = dist.group.WORLD
        assert world is not None
        numbers = all_gather_objects(world, len(distributed_c10d._world.pg_names))
        self._members_only = len(set(numbers)) == 1

    def __call__(
        self, partition: Partition, backend: str, name: str, timeout: timedelta, options: Any = None
    ) -> dist.ProcessGroup:
        """Make the groups of the partition, and return this rank's."""
        rank = dist.get_rank()
        own: dist.ProcessGroup | None = None
        for ranks in partition:
            if rank in ranks or not self._members_only:
                group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend=backend,
                    pg_options=options,
                    use_local_synchronization=self._members_only,
                    group_desc=f"hanayo {name}",
                )
                own = group if rank in ranks else own
        assert own is not None, f"rank {rank} is in no group of {name}"
        return own


def covering(groups: Partition, world_size: int) -> Partition:
    """A partition with these groups: the other ranks are groups of one."""
    held = {rank for ranks in groups for rank in ranks}
    return (*groups, *((rank,) for rank in range(world_size) if rank not in held))
