"""Saves and removes checkpoints during a run, at once or in the background, alike on all ranks.

Does one task after another in the background, until one fails.

Copies what a rank saves to host memory, so that training can go on while a thread writes it.

training's stream   ... backward, step | copies | forward, backward, step ...     the next step waits for no copy's end
writing thread                                  | waits for the copies | writes, hashes, commits
"""

import atexit
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event, Thread

import torch
from torch import Tensor

from lightning_hanayo.dist_checkpointing.commit import ANOTHER_ENDED, FolderSave, RankPart, RanksLost, SavingRanks
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import AtPoint, go_on, remove_checkpoint
from lightning_hanayo.errors import CheckpointError


class Background:
    """Does one task after another, each in a daemon thread, which never keeps the process alive. `wait` waits for all.

    Example:
        >>> tasks = Background()
        >>> tasks.add(write)
        >>> tasks.add(remove_old)  # once `write` has returned, and never if it raises
        >>> tasks.wait()
        True
    """

    error: BaseException | None = None
    """of the task that failed; those after it are left out"""
    _thread: Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all tasks are done, or left out."""
        return self._thread is None or not self._thread.is_alive()

    def add(self, task: Callable[[], None]) -> None:
        """Do the task after those before it."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                if self.error is None:
                    task()
            except BaseException as error:
                self.error = error

        self._thread = Thread(target=run, daemon=True, name=_THREAD)
        self._thread.start()

    def wait(self, within: float | None = None) -> bool:
        """Wait until all tasks are done, or left out; whether that happened `within` so many seconds."""
        if self._thread is not None:
            self._thread.join(within)
        return self.is_idle


_THREAD = "hanayo-checkpoint"


@atexit.register
def _wait_at_exit() -> None:
    """Let threads end before the interpreter does: one that returns from torch's C++ meanwhile aborts the process.

    A thread that waits for ranks which never answer is left alone: it doesn't return.
    """
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(ABANDON_WITHIN)


class HostBuffers:
    """Takes one snapshot after another into the same memory; on CUDA it is pinned, so that no host waits for a copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Region], Tensor] = {}

    def snapshot(self, part: RankPart) -> Callable[[], RankPart]:
        """Copy the part's tensors, on the streams that compute with them; return what waits for that and returns them.

        The next snapshot overwrites this one.
        """
        buffers = {}
        for one in part.tensors:
            key, tensor = (one.name, one.region), one.tensor
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            buffers[key] = buffer.copy_(tensor.detach(), non_blocking=True)
        self._buffers = buffers  # others are freed
        tensors = [replace(one, tensor=buffer) for buffer, one in zip(buffers.values(), part.tensors, strict=True)]
        devices = {one.tensor.device for one in part.tensors if one.tensor.device.type != "cpu"}
        events = {device: torch.Event(device) for device in devices}
        for device, event in events.items():
            event.record(torch.accelerator.current_stream(device))
        copied = replace(part, tensors=tensors)  # not made in `wait`, which would hold the tensors of the device

        def wait() -> RankPart:
            for event in events.values():
                event.synchronize()
            return copied

        return wait


ABANDON_WITHIN = 2.0
"""seconds for a save in flight to end by itself after a failure, and as many for it to stop"""


class Saver:
    """One rank's saves of a run. All ranks call its methods alike, and in the same order.

    Example:
        >>> saver = Saver(SavingRanks(group), background=SavingRanks(other_group))
        >>> saver.save("checkpoints/last.ckpt", part)  # returns when the part is copied
        >>> saver.poll()  # before each batch
        >>> saver.finish()

    Args:
        peers: all ranks.
        background: the same ranks over a group of its own, which the writing thread uses; None: `save` returns when the
            checkpoint is there.
        at: is called at each point of a save, by the thread that writes.

    Raises:
        CheckpointError: on all ranks alike. By `save`, `poll` and `finish` also for an earlier save in the background.
    """

    def __init__(self, peers: SavingRanks, background: SavingRanks | None = None, *, at: AtPoint = go_on) -> None:
        self._peers = peers
        self._background = background
        self._at = at
        self._is_abandoned = Event()
        self._in_flight: str | None = None
        self._start_afresh()

    def save(self, path: str, part: RankPart) -> None:
        """Save a folder. In the background: wait for the save before it, copy the part, and return."""
        if self._background is None:
            FolderSave(self._peers, path, part, at=self._at).run()
            return
        self.wait()
        peers, snapshot = self._background, self._buffers.snapshot(part)
        self._tasks.add(lambda: FolderSave(peers, path, snapshot(), at=self._at, check=self._check).run())
        self._in_flight = path

    def remove(self, path: str) -> None:
        """Remove a checkpoint once the save in flight has been committed; never, if it fails."""
        if self._peers.rank > 0:
            return
        if self._in_flight:
            self._tasks.add(partial(remove_checkpoint, path))
        else:
            remove_checkpoint(path)

    def poll(self) -> None:
        """Compare all ranks' states: go on, forget the save that has ended, or raise the error of the first rank."""
        if not self._in_flight:
            return
        is_idle, error = self._tasks.is_idle, self._tasks.error  # in this order: once idle, no error comes
        own = None if error is None else str(error)
        if not isinstance(error, CheckpointError | None):
            own = f"{type(error).__name__}: {error}"
        try:
            states = self._peers.all_gather((own, is_idle))
        except RanksLost as lost:
            unknown = f"{self._in_flight} may have been saved, or not: {ANOTHER_ENDED} ({lost})."
            raise CheckpointError(own or unknown) from lost
        if texts := [text for text, _ in states if text]:
            self._tasks.wait(ABANDON_WITHIN)  # the save ends on other ranks, too: they have agreed on its failure
            self._start_afresh()
            raise CheckpointError(texts[0]) from error
        if all(is_done for _, is_done in states):
            self._in_flight = None

    def wait(self) -> None:
        """Wait until the save in flight has been committed, and what it replaces is removed."""
        self._tasks.wait()
        self.poll()

    def finish(self) -> None:
        """Wait for the save in flight, and free its memory. More may be saved afterwards."""
        try:
            self.wait()
        finally:
            self._buffers = HostBuffers()

    def abandon(self) -> None:
        """End soon after a failure of the run, which other ranks may not have; a save in flight may be given up."""
        if not self._tasks.wait(ABANDON_WITHIN):
            self._is_abandoned.set()
            self._tasks.wait(ABANDON_WITHIN)
        self._start_afresh()  # a thread that still waits for other ranks is left alone
        for peers in (self._peers, self._background):
            if peers is not None:
                peers.close()

    def _check(self) -> None:
        if self._is_abandoned.is_set():
            raise CheckpointError("the run has failed meanwhile")

    def _start_afresh(self) -> None:
        self._in_flight = None
        self._tasks = Background()
        self._buffers = HostBuffers()
