"""The monitor of the process group of all ranks: linked right after that is made, and kept as long as it is.

The group belongs to the whole process, whatever Trainer has made it, and so does its monitor.
"""

import ipaddress
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_hanayo.monitor.member import Member
from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.parent import end_with_parent, outlive_parent
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects
from lightning_hanayo.topology import Topology

_LOOPBACK = "127.0.0.1"
_LOOK = 0.5
"""seconds between two looks at a process"""
_TO_END = 4.0
"""seconds that a process has to end by itself once the one that has started it has ended"""


@dataclass(frozen=True)
class _Monitored:
    group: "weakref.ref[dist.ProcessGroup]"
    """no more than a reference that lets it end: gloo wakes other ranks when its connections are closed"""
    monitor: Monitor
    outlives_parent: bool
    """whether Linux would kill this process together with another rank, and doesn't meanwhile"""


_monitored: list[_Monitored] = []
"""of the process group that is there now; at most one"""


def monitor_of_world(topology: Topology, rank: int, main_address: str) -> Monitor:
    """The monitor of the world's process group. Called by all ranks; the first time they exchange their addresses."""
    world = dist.group.WORLD
    assert world is not None
    for monitored in _monitored:
        if monitored.group() is world:
            return monitored.monitor
    close_monitor()
    monitor = Monitor(rank, topology.world_size, topology.place(rank), own_address(main_address))
    gathered = all_gather_objects(world, (monitor.member, secrets.token_hex(16)))
    monitor.connect([member for member, _ in gathered], gathered[0][1])
    _monitored.append(_Monitored(weakref.ref(world), monitor, _outlives_parent(monitor)))
    return monitor


def forget_monitor() -> None:
    """After a failure: the process group is left; who uses the monitor closes it."""
    if any(monitored.outlives_parent for monitored in _monitored):
        end_with_parent(os.getppid())
    _monitored.clear()


def close_monitor() -> None:
    """When the process group is destroyed, or another has taken its place."""
    for monitored in _monitored:
        monitored.monitor.close()
    forget_monitor()


def _outlives_parent(monitor: Monitor) -> bool:
    """Let a rank that another one has started say why that has ended, and end then; Linux would kill it at once."""
    own = monitor.member
    parent = next((one for one in monitor.members if one.is_beside(own) and one.pid == os.getppid()), None)
    if parent is None:
        return False

    def on_state(_: int, content: Any) -> None:
        if (content["rank"], content["state"]) == (parent.rank, "ended"):
            threading.Thread(target=_end_after, args=(parent,), daemon=True, name="hanayo-orphan").start()

    monitor.on("state", on_state)
    outlive_parent()
    return True


def _end_after(parent: Member) -> None:
    """It may have said good-bye, and wait for this process; but then there is nothing left to wait for."""
    while parent.exists:
        time.sleep(_LOOK)
    time.sleep(_TO_END)
    os._exit(1)


def own_address(main_address: str) -> str:
    """The address of this host on the way to the one where the ranks meet; loopback if they are all on one host."""
    with suppress(OSError):
        found = socket.getaddrinfo(main_address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            address = str(probe.getsockname()[0])
            return _LOOPBACK if ipaddress.ip_address(address).is_loopback else address
    return _LOOPBACK
