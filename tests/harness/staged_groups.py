"""Process groups for several processes on one GPU: tensors are copied to the host, go over gloo, and are copied back.

    device    wait for the caller's work | copy to the host, COPIED |       wait for ARRIVED      | copy back, DONE
    host                                               wait for COPIED | gloo, ARRIVED

As over NCCL, the host goes on at once, the transfers of a group run in the order in which they were called, and the
device waits for what hasn't come yet. On the CPU a thread stands in for the device; but messages between pipeline ranks
go over gloo as they are, because there the channels carry specs, too, which come in another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Backend

from lightning_hanayo.strategy.groups import NativeGroups
from lightning_hanayo.strategy.lightning import parallel_strategy
from tests.harness.lanes import HostProgress, Lane, PinnedProgress, Progress, StreamLane, ThreadLane

NAME = "staged"
_ARENA_BYTES = 512 << 20
_ALIGN = 64
_TIMEOUT_S = 60.0
COPIED, ARRIVED, DONE = 1, 2, 3
"""how far a transfer is: what is sent lies on the host; what is received does; its memory is free again"""

Start = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
"""starts the transfer over gloo, from what is read to what is written, and returns its work"""


class Staging:
    """The device that a process stages, and the memory of the host for it, pinned once: later it might wait."""

    def __init__(self, device: str) -> None:
        self.device_type = device
        self.groups: list[StagedGroup] = []
        on_gpu = device == "cuda" and torch.backends.cuda.is_built()  # else it is a pretended one
        self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8, pin_memory=True) if on_gpu else None
        self._next = 0
        self._under_way: deque[tuple[int, int, Progress]] = deque()
        """begin and end in the arena, in the order in which they were given out"""

    def new_lane(self) -> Lane:
        """A lane on the device."""
        return StreamLane() if self._arena is not None else ThreadLane(_TIMEOUT_S)

    def new_transfer(self) -> Progress:
        """A transfer that has not begun."""
        if self._arena is None:
            return HostProgress(_TIMEOUT_S)
        begin, end = self._take(4)
        progress = PinnedProgress(self._arena[begin:end].view(torch.int32))
        self._under_way.append((begin, end, progress))
        return progress

    def like(self, tensor: Tensor, progress: Progress) -> Tensor:
        """Contiguous memory of the host for a tensor, until the transfer is done."""
        if self._arena is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        begin, end = self._take(tensor.nbytes)
        self._under_way.append((begin, end, progress))
        return self._arena[begin:end].view(tensor.dtype).view(tensor.shape)

    def _take(self, num_bytes: int) -> tuple[int, int]:
        """The next part of the arena, which is used in a ring."""
        begin = self._next if self._next + num_bytes <= _ARENA_BYTES else 0
        end = begin + num_bytes
        self._next = -(-end // _ALIGN) * _ALIGN
        while self._under_way and self._under_way[0][2].value == DONE:
            self._under_way.popleft()
        for other_begin, other_end, progress in self._under_way:
            in_use = begin < other_end and other_begin < end and progress.value != DONE
            assert not in_use, f"more than {_ARENA_BYTES >> 20} MiB are under way: make the arena larger"
        return begin, end


_staging: Staging | None = None


@dataclass
class StagedWork:
    """A transfer under way. It keeps its tensors until it is waited for."""

    mark: Callable[[], object]
    errors: list[BaseException]
    tensors: tuple[Sequence[Tensor], ...]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the caller's work on the device wait for the transfer."""
        self.mark()
        self.tensors = ()
        if self.errors:
            raise self.errors[0]
        return True


class StagedGroup(dist.ProcessGroup):
    """A process group over gloo for tensors of the staged device. Others go over gloo as they are."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        assert _staging is not None, "made inside of `staged_groups`"
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._staging = _staging
        self._lane = _staging.new_lane()
        self._host = ThreadLane(_TIMEOUT_S)
        self._name = ""
        _staging.groups.append(self)

    def synchronize(self) -> None:
        """Let the host wait for the transfers."""
        self._lane.host_mark()()

    def close(self) -> None:
        """End the threads."""
        self._host.close()
        self._lane.close()

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_splitting=False, abort=self.abort)

    def abort(self) -> None:
        self._gloo.abort()

    def _staged(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], start: Start, *, is_message: bool = False
    ) -> Any:
        first, *_ = *reads, *writes
        if self is not dist.group.WORLD and self._staging.device_type != "cpu":
            assert first.device.type != "cpu", "NCCL carries no tensors of the CPU"
        if first.device.type != self._staging.device_type or (is_message and first.device.type == "cpu"):
            return start(reads, writes)
        lane, errors, progress = self._lane, list[BaseException](), self._staging.new_transfer()
        held = [self._staging.like(tensor, progress) for tensor in reads]
        made = held if writes is reads else [self._staging.like(tensor, progress) for tensor in writes]
        lane.follow_caller()
        for host, tensor in zip(held, reads, strict=True):
            lane.run(partial(host.copy_, tensor.detach(), non_blocking=True))
        progress.set_in(lane, COPIED)

        def transfer() -> None:
            try:
                progress.wait(COPIED, _TIMEOUT_S)
                start(held, made).wait()
            except BaseException as error:
                errors.append(error)
            progress.set(ARRIVED)

        self._host.run(transfer)
        progress.await_in(lane, ARRIVED)
        for tensor, host in zip(writes, made, strict=True):
            lane.run(partial(tensor.detach().copy_, host, non_blocking=True))
        progress.set_in(lane, DONE)
        return StagedWork(lane.mark(), errors, (reads, writes, held, made))

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Any:
        return self._staged(tensors, (), lambda read, _: self._gloo.send(list(read), destination, tag), is_message=True)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return self._staged((), tensors, lambda _, write: self._gloo.recv(list(write), source, tag), is_message=True)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = opts or dist.AllreduceOptions()
        if opts.reduceOp != dist.ReduceOp.AVG:
            return self._staged(tensors, tensors, lambda read, _: self._gloo.allreduce(list(read), opts))

        def start(read: Sequence[Tensor], _: Sequence[Tensor]) -> Any:  # gloo has no mean
            self._gloo.allreduce(list(read), dist.AllreduceOptions()).wait()
            torch._foreach_div_(list(read), self.size())
            return _All()

        return self._staged(tensors, tensors, start)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _All([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._staged(tensors, tensors, lambda read, _: self._gloo.broadcast(list(read), opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (out,), (own,) = outputs, inputs
        return self._staged([own], out, lambda read, write: self._gloo.allgather([list(write)], list(read)))

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        def start(read: Sequence[Tensor], write: Sequence[Tensor]) -> Any:
            return self._gloo.allgather([list(write[0].view(self.size(), -1))], [read[0].view(-1)])

        return self._staged([own], [output], start)

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, opts: Any = None) -> Any:
        def start(read: Sequence[Tensor], write: Sequence[Tensor]) -> Any:
            self._gloo.allreduce([read[0]], dist.AllreduceOptions()).wait()
            write[0].view(-1).copy_(read[0].view(self.size(), -1)[self.rank()])
            return _All()

        return self._staged([parts], [output], start)

    def allgather_into_tensor_coalesced(self, outputs: Sequence[Tensor], own: Sequence[Tensor], *_: Any) -> Any:
        return _All([self._allgather_base(output, one) for output, one in zip(outputs, own, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], *_: Any) -> Any:
        return _All([self._reduce_scatter_base(output, one) for output, one in zip(outputs, parts, strict=True)])

    def alltoall_base(self, output: Tensor, parts: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None) -> Any:
        def start(read: Sequence[Tensor], write: Sequence[Tensor]) -> Any:
            return self._gloo.alltoall_base(write[0], read[0], out_sizes, in_sizes, dist.AllToAllOptions())

        return self._staged([parts], [output], start)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(dist.BarrierOptions())


@dataclass(frozen=True)
class _All:
    """Several transfers as one; none, for one that is done."""

    works: Sequence[StagedWork] = ()

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def synchronize_device() -> None:
    """Let the host wait for all that this process has posted."""
    if _staging is not None and _staging.device_type == "cpu":
        for group in _staging.groups:
            group.synchronize()
    else:
        torch.cuda.synchronize()


@contextmanager
def staged_groups(device: str) -> Iterator[None]:
    """Trainers that start in it use staged groups for tensors of the device."""
    global _staging
    _staging = Staging(device)
    factory, backends = parallel_strategy.group_factory, dict(Backend.default_device_backend_map)
    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
    Backend.default_device_backend_map[device] = NAME
    parallel_strategy.group_factory = NativeGroups
    try:
        yield
    finally:
        parallel_strategy.group_factory = factory
        Backend.default_device_backend_map.update(backends)
        for group in _staging.groups:
            group.close()
        _staging = None
