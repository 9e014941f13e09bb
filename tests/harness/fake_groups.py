"""Groups that stand in for those of GPUs: torch's fake process group in one process, or gloo in several.

A fake collective copies this rank's values, a fake receive leaves its buffer as it is: results are wrong, but all
calls are made. The groups count as native, so tensors of the CPU take the ways that those of GPUs take over NCCL.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hanayo.strategy.groups import GroupFactory, GroupSettings, Partition
from lightning_hanayo.strategy.lightning import parallel_strategy


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """This process is rank `rank` of a world without other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class ChannelsOverGloo(GroupFactory):
    """Groups over gloo that count as native: messages go over channels, which are connected and aborted as on GPUs."""

    is_native = True


@contextmanager
def channels_over_gloo() -> Iterator[None]:
    """Trainers that start in it send their messages over channels."""
    factory = parallel_strategy.group_factory
    parallel_strategy.group_factory = ChannelsOverGloo
    try:
        yield
    finally:
        parallel_strategy.group_factory = factory


class FakeGroups(GroupFactory):
    """Makes fake groups, and records them. Needs a `fake_world`."""

    is_native = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), timedelta(minutes=1))
        self.made: list[tuple[str, Partition]] = []
        """for each creation: what for, and the groups"""

    def of(self, name: str) -> list[Partition]:
        """What was made under this name."""
        return [partition for made, partition in self.made if made == name]

    def _make(self, partition: Partition, backend: str, name: str, options: Any = None) -> dist.ProcessGroup:
        return self._record(name, partition)

    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        return self._record(settings.name, partition)

    def _record(self, name: str, partition: Partition) -> dist.ProcessGroup:
        self.made.append((name, partition))
        own = next(ranks for ranks in partition if dist.get_rank() in ranks)
        group: dist.ProcessGroup = dist.new_group(list(own), backend="fake", use_local_synchronization=True)
        return group
