"""Process groups on GPUs: tensor groups over NCCL, each partition split off in one call; control groups over gloo.

world (cpu:gloo, cuda:nccl, bound to this rank's device)
|-- native world (nccl)          its communicator is what the others are split off from
|   |-- data, cube, channel ...  one `split_group` per partition: one call of ncclCommSplit on every rank
|-- control ...                  gloo, made by their members

torch's `split_group` splits all backends of the parent, so the parent is a group over NCCL alone.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend
from typing_extensions import override

from lightning_hanayo.strategy.groups.factory import (
    DATA,
    GlooGroups,
    GroupFactory,
    GroupSettings,
    Partition,
)

_NCCL = "nccl"


_native: "dict[tuple[torch.device, timedelta], NativeGroups]" = {}
"""of this process's world, which keeps all groups: Trainers share those on the GPU, whose buffers are large"""


def group_factory(device: torch.device, timeout: timedelta) -> GroupFactory:
    """The factory for a Trainer's runs on this device. Called by all ranks of the world, which is initialized."""
    if device.type == "cpu":
        return GlooGroups(device, timeout)
    factory = _native.get((device, timeout))
    if factory is None or not factory.is_open:
        factory = _native[device, timeout] = NativeGroups(device, timeout)
        return factory
    factory.forget_control()
    factory.agree_on_names()
    return factory


def forget_groups() -> None:
    """After a failure: drop all groups."""
    _native.clear()


def backend_for(device: torch.device) -> str:
    """The backends to initialize: with a GPU also gloo, since models are broadcast while they are on the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{_native_backend(device)}"


class NativeGroups(GroupFactory):
    """On GPUs. Where NCCL can't split (an older NCCL, a world that isn't bound to a device, another kind of device),
    groups are made one by one by their members.
    """

    is_native = True

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        super().__init__(device, timeout)
        self._backend = _native_backend(device)
        self._parent = self._make_parent() if _can_split(device) else None

    @override
    def _native_groups(self) -> Sequence[dist.ProcessGroup]:
        world = dist.group.WORLD  # has a communicator, too: barriers and decisions of all ranks use it
        return self._tensor_groups if world is None else [world, *self._tensor_groups]

    def _make_parent(self) -> dist.ProcessGroup:
        parent: dist.ProcessGroup = dist.new_group(
            backend=self._backend,
            timeout=self.timeout,
            pg_options=nccl_options(DATA, self.timeout),
            group_desc="hanayo native world",
        )
        self._tensor_groups.append(parent)
        return parent

    @override
    def _make_control(self, partition: Partition) -> dist.ProcessGroup:
        return self._make(partition, "gloo", "control", self.timeout)

    @override
    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        options = nccl_options(settings, self.timeout) if self._backend == _NCCL else None
        group: dist.ProcessGroup | None
        if self._parent is None:
            group = self._make(partition, self._backend, settings.name, self.timeout, options)
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
