"""The states of all ranks' processes, as one rank sees them: running, silent, stopped, or ended, and how.

running  --- nothing heard for 5 s --->  silent  --- state T in /proc --->  stopped
   |                                        |  something is heard: running again
   '--- it says good-bye, its process ends, or its links end ---> ended

A neighbour's silence is observed over the link, a process's state by ranks of its host. All ranks hear of each change.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.overlay import Overlay
from lightning_hanayo.monitor.processes import Member

State = Literal["running", "silent", "stopped", "ended"]


@dataclass(frozen=True)
class Timing:
    """Seconds. Tests have less time than users."""

    ping: float = 1.0
    silent: float = 5.0
    """without a ping; then the process is looked at"""
    lost: float = 2.0
    """from the end of a link until the rank at the other end counts as ended, unless it is linked again"""
    takeover: float = 1.0
    """that a rank has to decide; then the next one does"""
    look: float = 0.25
    """between two looks at all of these"""


@dataclass
class Peer:
    """The known state of one rank."""

    state: State = "running"
    since: float = 0.0
    """when that began, by this process's `time.monotonic`; silence begins when something was heard last"""
    reason: str = ""
    """how it has ended, to be put after its name; "" if it has said good-bye"""


class Peers:
    """All ranks, as one of them sees them. It belongs to the thread of the event loop; others may read.

    Args:
        rank: this one.
        members: of all ranks.
        overlay: hears of neighbours, and tells all ranks.
        timing: limits of silence.
    """

    def __init__(self, rank: int, members: Sequence[Member], overlay: Overlay, timing: Timing) -> None:
        self._started = time.monotonic()
        self._rank, self._members, self._own = rank, members, members[rank]
        self._overlay, self._timing = overlay, timing
        self._peers = {member.rank: Peer(since=self._started) for member in members}
        self._pidfds: dict[int, int] = {}
        self._memory_kills = processes.out_of_memory_kills()

    def open(self) -> None:
        """Begin to watch the processes of this host."""
        for member in self._members:
            if member.is_beside(self._own) and (pidfd := processes.open_pidfd(member.pid)) is not None:
                self._pidfds[member.rank] = pidfd
                asyncio.get_running_loop().add_reader(pidfd, self._process_ended, member.rank)

    def close(self) -> None:
        """Watch no more."""
        for rank in list(self._pidfds):
            self._unwatch(rank)

    def of(self, rank: int) -> Peer:
        """The known state of a rank."""
        return self._peers[rank]

    @property
    def running(self) -> list[int]:
        """The ranks that run, as far as is known, this one included."""
        return [rank for rank, peer in self._peers.items() if peer.state == "running" or rank == self._rank]

    def look(self) -> None:
        """Called again and again: look at neighbours that have been silent, and at lost ones."""
        now = time.monotonic()
        for rank in self._overlay.neighbours:
            peer, lost = self._peers[rank], self._overlay.lost.get(rank)
            quiet = now - max(self._overlay.heard(rank) or lost or 0.0, self._started)
            if peer.state == "ended":
                continue
            if lost is not None and quiet >= self._timing.lost:
                self._observe(rank, "ended", "ended its connections without saying why")
            elif quiet >= self._timing.silent:
                self._look_into_process(rank, "silent")
            elif lost is not None:
                self._look_into_process(rank, peer.state)
            elif peer.state != "running":
                self._observe(rank, "running")
        for rank, peer in self._peers.items():
            if peer.state in ("silent", "stopped") and rank not in self._overlay.neighbours:
                self._look_into_process(rank, peer.state)

    def restart_clocks(self) -> None:
        """This process could not look at anything for a while: silence of others means nothing."""
        self._started = now = time.monotonic()
        for peer in self._peers.values():
            if peer.state in ("silent", "stopped"):
                peer.state, peer.since = "running", now

    def on_state(self, observer: int, content: Any) -> bool:
        """Called with a rank's observation; return whether it is news to this one."""
        rank, state = content["rank"], content["state"]
        peer = self._peers[rank]
        # of neighbours this rank sees itself whether they are silent
        sees_it_run = rank in self._overlay.neighbours and observer != self._rank and state in ("silent", "running")
        if rank == self._rank or peer.state == "ended" or peer.state == state or sees_it_run:
            return False
        self._peers[rank] = Peer(state, time.monotonic() - content["seconds"], content["reason"])
        if state == "ended":
            self._overlay.forget(rank)
        if state == "silent":
            self._look_into_process(rank, state)
        return True

    def _look_into_process(self, rank: int, otherwise: State) -> None:
        """Observe how the process is; if this can't be seen, or says nothing, it is `otherwise`."""
        member = self._members[rank]
        if member.is_beside(self._own):
            if not member.exists:
                self._process_ended(rank)
                return
            if otherwise != "running" and member.is_stopped:
                otherwise = "stopped"
        self._observe(rank, otherwise)

    def _process_ended(self, rank: int) -> None:
        status = processes.exit_status(self._members[rank].pid, self._pidfds.get(rank))
        self._unwatch(rank)
        short = processes.out_of_memory_kills() > self._memory_kills
        reason = processes.describe_end(status, memory_was_short=short)
        if self._peers[rank].state == "ended":
            self._peers[rank].reason = self._peers[rank].reason or reason
        else:
            self._observe(rank, "ended", reason)

    def _unwatch(self, rank: int) -> None:
        if (pidfd := self._pidfds.pop(rank, None)) is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            with suppress(OSError):
                os.close(pidfd)

    def _observe(self, rank: int, state: State, reason: str = "") -> None:
        peer = self._peers[rank]
        if peer.state != state:
            was_quiet = peer.since if peer.state == "silent" else self._overlay.heard(rank)
            since = was_quiet if state in ("silent", "stopped") and was_quiet is not None else time.monotonic()
            seconds = time.monotonic() - since
            self._overlay.flood("state", {"rank": rank, "state": state, "reason": reason, "seconds": seconds})
