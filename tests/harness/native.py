"""Process groups on the CPU that the package takes for native ones, such as NCCL's: exact, and every call is counted.

A group of the backend "native" does what NCCL's would, over gloo. So all branches for native groups run in a test,
and what they compute can be compared. As in NCCL, transfers between two ranks are matched in the order in which they
were posted, whatever their tags.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hanayo.strategy.groups import GroupFactory, GroupSettings, Partition
from lightning_hanayo.strategy.lightning import parallel_strategy

BACKEND = "native"


class Call(NamedTuple):
    """A kind of call on the groups of one purpose."""

    purpose: str
    """"channel", "cube" or "data" """
    kind: str


class NativeGroup(dist.ProcessGroup):
    """A process group over gloo, in which only what a native group has is there."""

    calls: "Counter[Call]" = Counter()
    """of all groups of this process, since it was last cleared"""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return BACKEND

    def _allgather_base(self, whole: Tensor, own: Tensor, *options: Any) -> dist.Work:
        self._check(whole, own, ratio=self.size())
        self._count("all_gather")
        return self._gloo._allgather_base(whole.view(-1), own.view(-1), *options)

    def allgather(self, parts: list[list[Tensor]], own: list[Tensor], *options: Any) -> dist.Work:
        self._check(*parts[0], *own)
        self._count("all_gather")
        return self._gloo.allgather(parts, own, *options)

    def _reduce_scatter_base(self, own: Tensor, parts: Tensor, *options: Any) -> dist.Work:
        self._check(parts, own, ratio=self.size())
        self._count("reduce_scatter")
        total = parts.clone()
        self._gloo.allreduce([total]).wait()
        own.copy_(total.view(self.size(), -1)[self.rank()].view_as(own))
        return self._gloo.barrier()

    def allgather_into_tensor_coalesced(self, wholes: list[Tensor], own: list[Tensor], *options: Any) -> dist.Work:
        with self._one_call():
            works = [self._allgather_base(whole, part) for whole, part in zip(wholes, own, strict=True)]
        return _All(works)

    def reduce_scatter_tensor_coalesced(self, own: list[Tensor], parts: list[Tensor], *options: Any) -> dist.Work:
        with self._one_call():
            works = [self._reduce_scatter_base(part, whole) for part, whole in zip(own, parts, strict=True)]
        return _All(works)

    def alltoall_base(self, received: Tensor, sent: Tensor, *options: Any) -> dist.Work:
        self._check(received, sent)
        self._count("all_to_all")
        return self._gloo.alltoall_base(received, sent, *options)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        self._check(*tensors)
        self._count("all_reduce")
        return self._gloo.allreduce(tensors, *options)

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        assert len({tensor.dtype for tensor in tensors}) == 1, "types differ"
        assert all(torch.empty_like(one).stride() == one.stride() for one in tensors), "not dense"
        self._count("all_reduce")
        return self._gloo.allreduce_coalesced(tensors, *options)

    def broadcast(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        self._check(*tensors)
        self._count("broadcast")
        return self._gloo.broadcast(tensors, *options)

    def barrier(self, *options: Any, **opts: Any) -> dist.Work:
        self._count("barrier")
        return self._gloo.barrier()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self._count("send")
        return self._gloo.send(tensors, peer, 0)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self._count("receive")
        return self._gloo.recv(tensors, peer, 0)

    def _check(self, whole: Tensor, *others: Tensor, ratio: int = 1) -> None:
        """What NCCL's group refuses (`check_gpu_single_tensor` and its callers in torch 2.10 to 2.13)."""
        for tensor in (whole, *others):
            assert tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last), "not contiguous"
            assert tensor.dtype is whole.dtype, "output and input have different types"
        assert all(whole.numel() == ratio * other.numel() for other in others), "sizes don't match"

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Inside it, all calls count as one: NCCL runs them in one launch."""
        before = NativeGroup.calls.copy()
        yield
        for call in NativeGroup.calls - before:
            NativeGroup.calls[call] = before[call] + 1

    def _count(self, kind: str) -> None:
        NativeGroup.calls[Call(self.group_desc.removeprefix("hanayo "), kind)] += 1


class _All(dist.Work):
    """Several transfers, which are waited for as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        results = [work.wait(*timeout) for work in self._works]  # of all, also after one that failed
        return all(results)


class StandInGroups(GroupFactory):
    """A factory whose tensor groups are native ones, on the CPU."""

    is_native = True

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        super().__init__(device, timeout)
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(BACKEND, NativeGroup, devices=["cpu"])

    def _make_tensors(self, partition: Partition, settings: GroupSettings) -> dist.ProcessGroup:
        return self._make(partition, BACKEND, settings.name)


@contextmanager
def native_groups() -> Iterator[None]:
    """Inside it, runs on the CPU get native tensor groups, and counting begins anew."""
    NativeGroup.calls.clear()
    with patch.object(parallel_strategy, "group_factory", StandInGroups):
        yield
