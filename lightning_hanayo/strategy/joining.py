"""The store in which the ranks of one start find each other; who is missing there is named.

torchrun --max-restarts starts all ranks again with the same store. A rank that finds the old address of another one
there waits for it until the time-out. So rank 0 makes up a prefix for the keys of this start, and tells each rank:

    rank 1    sets   hello/1 = its own text, which no process has had before
    rank 0    reads  hello/1, and sets prefix/<that text>
    rank 1    reads  prefix/<its text>, and sets <prefix>/here/1

What processes of earlier starts have left is answered, too, but nobody reads that.
"""

import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_hanayo.errors import HanayoError

_HELLO, _PREFIX = "hanayo/hello", "hanayo/prefix"
_POLL = 0.01
"""seconds between two looks for a rank that has not come"""
FIRST, AGAIN = 15.0, 60.0
"""seconds until missing ranks are named, and until they are named again"""


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
        is_master = rank == 0 and not is_kept_by_agent
        try:
            store = TCPStore(
                address,
                port if world_size > 1 else 0,  # a rank alone needs no port that others know
                world_size,
                is_master,
                timeout,
                wait_for_workers=False,
                multi_tenant=not is_kept_by_agent,
            )
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
        while not _greet(store, start, own, missing):
            if time.monotonic() > deadline:
                raise HanayoError(_end_of_wait(missing, timeout))
            time.sleep(_POLL)
        return start
    store.set(f"{_HELLO}/{rank}", own)
    try:
        store.wait([f"{_PREFIX}/{own}"], timeout)  # not by looking again and again: there may be a thousand ranks
    except RuntimeError as error:
        raise HanayoError(_end_of_wait(missing, timeout)) from error
    found = PrefixStore(f"hanayo/start/{store.get(f'{_PREFIX}/{own}').decode()}", store)
    found.set(f"here/{rank}", "")
    return found


def _greet(store: Store, start: Store, prefix: str, missing: set[int]) -> bool:
    """Tell the prefix to those that have come since; return whether all are there."""
    for rank in sorted(missing):
        if start.check([f"here/{rank}"]):
            missing.discard(rank)
        elif store.check([f"{_HELLO}/{rank}"]):
            store.set(f"{_PREFIX}/{store.get(f'{_HELLO}/{rank}').decode()}", prefix)
    return not missing


def _end_of_wait(missing: Collection[int], timeout: timedelta) -> str:
    return f"{_text(missing)} joined the run within {timeout} (timeout). {_WHERE}"


@contextmanager
def _naming(missing: Collection[int], timeout: timedelta, *, is_silent: bool) -> Iterator[None]:
    """Inside it, name the missing ranks again and again. In a thread: this one may wait in C++ for rank 0's store."""
    is_over = threading.Event()

    def name() -> None:
        since, wait = time.monotonic(), FIRST
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
    first = sorted(ranks)[:8]
    more = f" and {len(ranks) - len(first)} more" * (len(ranks) > len(first))
    return (
        f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, first))}{more} {'has' if len(ranks) == 1 else 'have'} not"
    )
