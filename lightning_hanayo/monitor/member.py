"""What the ranks of a world tell each other about their processes before their monitors are linked."""

import os
from dataclasses import dataclass

from lightning_hanayo.monitor import processes


@dataclass(frozen=True)
class Member:
    """The process of one rank."""

    rank: int
    place: str
    """on the axes of the topology, such as "pipeline 1, data 0\""""
    address: str
    port: int
    pid: int
    started: int
    """when the process started, in clock ticks since its host did: another process with its pid has another one"""
    host: str
    """the same for processes that see each other in /proc"""

    @classmethod
    def of_this_process(cls, rank: int, place: str, address: str, port: int) -> "Member":
        """What other ranks need to know to reach this one."""
        pid = os.getpid()
        return cls(rank, place, address, port, pid, processes.started(pid), processes.host())

    def is_beside(self, other: "Member") -> bool:
        """Whether it is another process, and can be looked at from the other's."""
        return self.host == other.host and self.pid != other.pid

    @property
    def exists(self) -> bool:
        """Whether the process has not ended. Asked by processes of its host."""
        return processes.started(self.pid) == self.started and processes.state(self.pid) not in processes.ENDED

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal. Asked by processes of its host."""
        return processes.state(self.pid) in processes.STOPPED and processes.started(self.pid) == self.started
