"""Saves and removes checkpoints during a run, at once or in the background, alike on all ranks."""

from functools import partial
from threading import Event

from lightning_hanayo.checkpoint.save.background import Background
from lightning_hanayo.checkpoint.save.folder.commit import FolderSave
from lightning_hanayo.checkpoint.save.folder.points import AtPoint, go_on
from lightning_hanayo.checkpoint.save.part import RankPart
from lightning_hanayo.checkpoint.save.peers import ANOTHER_ENDED, Peers, PeersLost
from lightning_hanayo.checkpoint.save.removal import remove_checkpoint
from lightning_hanayo.checkpoint.save.snapshot import HostBuffers, Snapshot
from lightning_hanayo.errors import CheckpointError

_DONE, _WRITES, _FAILED = range(3)
"""states of a save in flight: on all ranks together it is in the largest of theirs"""

ABANDON_WITHIN = 2.0
"""seconds for a save in flight to end by itself after a failure, and as many for it to stop"""


class Saver:
    """One rank's saves of a run. All ranks call its methods alike, and in the same order.

    Example:
        >>> saver = Saver(GroupPeers(group), background=GroupPeers(other_group))
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

    def __init__(self, peers: Peers, background: Peers | None = None, *, at: AtPoint = go_on) -> None:
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
        snapshot = self._buffers.snapshot(part)
        self._tasks.add(partial(self._write, self._background, path, snapshot))
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
        """Look whether the save in flight has ended on all ranks, or failed on any."""
        if self._in_flight:
            self._settle()

    def wait(self) -> None:
        """Wait until the save in flight has been committed, and what it replaces is removed."""
        if self._in_flight:
            self._tasks.wait()
            self._settle()

    def finish(self) -> None:
        """Wait for the save in flight, and end the thread. More may be saved afterwards."""
        try:
            self.wait()
        finally:
            self._tasks.end()
            self._buffers = HostBuffers()

    def abandon(self) -> None:
        """End soon after a failure of the run, which other ranks may not have; a save in flight may be given up."""
        if not self._tasks.end(ABANDON_WITHIN):
            self._is_abandoned.set()
            self._tasks.end(ABANDON_WITHIN)
        self._start_afresh()  # a thread that still waits for other ranks is left alone
        for peers in (self._peers, self._background):
            if peers is not None:
                peers.close()

    def _write(self, peers: Peers, path: str, snapshot: Snapshot) -> None:
        FolderSave(peers, path, snapshot.wait(), at=self._at, check=self._check).run()

    def _check(self) -> None:
        if self._is_abandoned.is_set():
            raise CheckpointError("the run has failed meanwhile")

    def _settle(self) -> None:
        """Compare all ranks' states: go on, forget the save that has ended, or raise the error of the first rank."""
        is_idle, error = self._tasks.is_idle, self._tasks.error  # in this order: once idle, no error comes
        own = None if error is None else _text(error)
        try:
            state = self._peers.largest(_FAILED if own else _DONE if is_idle else _WRITES)
            texts = self._peers.all_gather(own) if state == _FAILED else ()
        except PeersLost as lost:
            unknown = f"{self._in_flight} may have been saved, or not: {ANOTHER_ENDED} ({lost})."
            raise CheckpointError(own or unknown) from lost
        if state == _FAILED:
            self._tasks.end(ABANDON_WITHIN)  # the save ends on other ranks, too: they have agreed on its failure
            self._start_afresh()
            raise CheckpointError(next(text for text in texts if text)) from error
        if state == _DONE:
            self._in_flight = None

    def _start_afresh(self) -> None:
        self._in_flight = None
        self._tasks = Background()
        self._buffers = HostBuffers()


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
