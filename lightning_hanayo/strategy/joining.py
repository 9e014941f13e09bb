"""Joining: how the ranks of one start find each other, and what they agree on before and after their groups exist.

torchrun --max-restarts starts all ranks again with the same store. A rank that finds the old address of another one
there waits for it until the time-out. So rank 0 makes up a prefix for the keys of this start, and tells each rank:

    rank 1    sets   hello/1 = its own text, which no process has had before
    rank 0    reads  hello/1, and sets prefix/<that text>
    rank 1    reads  prefix/<its text>, and sets <prefix>/here/1

Keys that processes of earlier starts have set are answered, too, but nobody reads the answers.

Afterwards the process group of all ranks is made, and linked by their monitors (`monitor_of_world`); `on_all_ranks`
runs a function on each rank, and lets all of them raise the error that one has.
"""

import ipaddress
import os
import re
import secrets
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.processes import Member, end_with_parent, outlive_parent
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.strategy.waits import named
from lightning_hanayo.topology import Topology

_HELLO, _PREFIX = "hanayo/hello", "hanayo/prefix"
_POLL = 0.01
"""seconds between two looks for a rank that has not come"""
FIRST, AGAIN = 15.0, 60.0
"""seconds until missing ranks are named, at the earliest, and until they are named again"""
_SLOWER = 3.0
"""how much longer other processes may need to come here than this one has needed: they import side by side"""


def store_of_start(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta, environment: Mapping[str, str]
) -> Store:
    """The store of this start: torchrun's agent keeps it, or rank 0. Called by all ranks.

    Args:
        address: of the store, as is `port`.
        rank: of this process.
        world_size: how many ranks come.
        timeout: how long they are waited for.
        environment: tells whether torchrun's agent has a store.

    Raises:
        HanayoError: some ranks do not come, or another program has the port.
    """
    is_kept_by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    missing = set(range(1, world_size)) if rank == 0 else {0}
    with _naming(missing, timeout, is_silent=rank > 1):  # one of the others is enough to name rank 0
        is_master, options = rank == 0 and not is_kept_by_agent, {"multi_tenant": not is_kept_by_agent}
        port = port if world_size > 1 or is_kept_by_agent else 0  # a rank alone needs no port that others know
        try:
            store = TCPStore(address, port, world_size, is_master, timeout, wait_for_workers=False, **options)
        except DistNetworkError as error:
            if not is_master or "EADDRINUSE" not in str(error):
                raise
            advice = "End it, or set MASTER_PORT to another port, the same on all nodes."
            raise HanayoError(f"another program has port {port}, where the ranks should meet. {advice}") from None
        return _fresh_store(store, rank, missing, timeout)


def serve_store() -> TCPStore:
    """A store on a free port, its attribute `port`, for processes that start later.

    It is bound at once, so that no other program can take the port meanwhile. In this process `store_of_start` with
    that port shares it; another process that calls it must find TORCHELASTIC_USE_AGENT_STORE=True.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _fresh_store(store: Store, rank: int, missing: set[int], timeout: timedelta) -> Store:
    """A part of `store` that only these ranks know, in which nothing is. Called by all of them.

    Raises:
        HanayoError: a rank does not come; on another rank than 0: rank 0 does not.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        start = PrefixStore(f"hanayo/start/{own}", store)
        deadline = time.monotonic() + timeout.total_seconds()
        while missing:
            if time.monotonic() > deadline:
                raise HanayoError(_end_of_wait(missing, timeout))
            for one in sorted(missing):
                if start.check([f"here/{one}"]):
                    missing.discard(one)
                elif store.check([f"{_HELLO}/{one}"]):
                    store.set(f"{_PREFIX}/{store.get(f'{_HELLO}/{one}').decode()}", own)
            time.sleep(_POLL if missing else 0.0)
        return start
    store.set(f"{_HELLO}/{rank}", own)
    try:
        store.wait([f"{_PREFIX}/{own}"], timeout)  # not by looking again and again: there may be a thousand ranks
    except RuntimeError as error:
        raise HanayoError(_end_of_wait(missing, timeout)) from error
    found = PrefixStore(f"hanayo/start/{store.get(f'{_PREFIX}/{own}').decode()}", store)
    found.set(f"here/{rank}", "")
    return found


def _end_of_wait(missing: Collection[int], timeout: timedelta) -> str:
    return f"{_text(missing)} joined the run within {timeout} (timeout). {_WHERE}"


@contextmanager
def _naming(missing: Collection[int], timeout: timedelta, *, is_silent: bool) -> Iterator[None]:
    """Inside it, name the missing ranks again and again. In a thread: this one may wait in C++ for rank 0's store."""
    is_over = threading.Event()

    def name() -> None:
        since, own = time.monotonic(), time.time() - psutil.Process().create_time()
        wait = min(AGAIN, max(FIRST, _SLOWER * own * max(1.0, len(missing) / (os.cpu_count() or 1))))
        while not is_over.wait(wait):
            waited = f"for {time.monotonic() - since:.0f} s; the run ends after {timeout} (timeout)"
            print(f"{_text(missing)} joined the run {waited}. {_WHERE}", file=sys.stderr, flush=True)
            wait = AGAIN

    if not is_silent:
        threading.Thread(target=name, daemon=True, name="hanayo-joining").start()
    try:
        yield
    finally:
        is_over.set()


_WHERE = "Look at what they do before the Trainer starts, such as imports, and at the output of their nodes."


def _text(ranks: Collection[int]) -> str:
    return f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} not"


_LOOPBACK = "127.0.0.1"
_LOOK = 0.5
"""seconds between two looks at a process"""
_TO_LEAVE = 3.0
"""seconds that rank 0 waits for the others to leave the process group"""
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
    """The monitor of the world's process group. Called by all ranks; the first time they exchange their addresses.

    The group belongs to the whole process, whatever Trainer has made it, and so does its monitor.
    """
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
    """When the process group is destroyed, or another has taken its place.

    Rank 0 serves the store in which the others may still read what they have agreed on: it leaves last.
    """
    for monitored in _monitored:
        if monitored.monitor.rank == 0:
            monitored.monitor.wait_for_goodbyes(_TO_LEAVE)
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


_GLOO = re.compile(r"(gloo/\S+\] ?|^(?=Application timeout caused))(?P<what>.+)")
"""its errors begin with the file and line that they come from, except where another wait has closed the connection"""
_NCCL = re.compile(
    r"ncclRemoteError|remote process exited|communicator was aborted|connection (closed|reset|refused)|broken pipe"
    r"|timed? ?out|Watchdog caught collective operation",
    re.IGNORECASE,
)
_LONGEST = 200


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error, or one that it was made of, says no more than that another rank doesn't answer.

    Then it is a consequence, and its cause is on another rank.
    """
    return any(_says_so(one) for one in _with_causes(error))


def what_was_lost(error: BaseException) -> str:
    """The text of such an error, in one line: without the places in C++ files."""
    found = next((one for one in _with_causes(error) if _says_so(one)), error)
    line = str(found).strip().partition("\n")[0]
    gloo = _GLOO.search(line)
    return (gloo["what"] if gloo else line)[:_LONGEST].strip().rstrip(".")


def _says_so(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


_T = TypeVar("_T")


def place_in_world() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_all_ranks(function: Callable[[], _T]) -> list[_T]:
    """The results of the function on all ranks, in rank order. Called by all ranks of the world, if there are several.

    Raises:
        HanayoError: on all ranks with the same message, if the function has raised one on any.
    """
    world = dist.group.WORLD
    if world is None:
        return [function()]
    own: list[_T] = []
    failure: HanayoError | None = None
    try:
        own = [function()]
    except HanayoError as error:
        failure = error
    outcomes = all_gather_objects(world, (own, failure and (type(failure), str(failure))))
    failures = [found for _, found in outcomes if found]
    if failures:
        kind, message = failures[0]
        if len(failures) < len(outcomes):
            first = next(rank for rank, (_, found) in enumerate(outcomes) if found)
            message = f"rank {first}: {message}"
        raise kind(message) from failure
    return [one for found, _ in outcomes for one in found]


def with_common_errors(function: Callable[[], _T]) -> _T:
    """The result of the function here; nothing else is sent. Called and raises as `on_all_ranks`."""
    own: list[_T] = []
    on_all_ranks(lambda: own.append(function()))
    return own[0]
