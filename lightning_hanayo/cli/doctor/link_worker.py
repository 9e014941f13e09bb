"""One process of those that measure links: joins the others, and sends to each of them in turn.

Run by `hanayo doctor --devices N` as `python -m lightning_hanayo.cli.doctor.link_worker`, with torchrun's variables and
the path for rank 0's result; or called in the ranks that torchrun or SLURM has started.

What the links between ranks can do: their latency and bandwidth, and the worst pair of them.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_hanayo.cli.doctor.host import Finding, gibibytes
from lightning_hanayo.errors import available
from lightning_hanayo.pipeline_parallel.comm.object_collectives import all_gather_objects

_TOPIC = "links"
_SLOWER = 4.0
"""times as slow as the median, from which on a pair is named as a problem of its own"""


@dataclass(frozen=True)
class Link:
    """Between two ranks."""

    first: int
    second: int
    latency: float
    """seconds that a small message takes"""
    bandwidth: float
    """bytes per second of large messages"""


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured together."""

    device: str
    """"cpu" or "cuda": where the messages were"""
    hosts: Sequence[str]
    """of each rank"""
    links: Sequence[Link]
    all_reduce: float
    """bytes of a gradient that all ranks reduce per second"""
    given: Sequence[Any] = ()
    """what each rank has told the others"""

    @staticmethod
    def from_json(document: dict[str, Any]) -> "Measured":
        """The inverse of `dataclasses.asdict`."""
        return Measured(**document | {"links": [Link(**link) for link in document["links"]]})


def examine(measured: Measured) -> Iterator[Finding]:
    """Sum up the links in a node and those between nodes, and name slow ones."""
    kinds = {
        "in a node": [one for one in measured.links if _is_inside(measured, one)],
        "between nodes": [one for one in measured.links if not _is_inside(measured, one)],
    }
    for where, links in kinds.items():
        if links:
            yield from _summary(f"{len(links)} pairs {where} ({measured.device})", links)
    if len(measured.hosts) > 1:
        value = f"{gibibytes(measured.all_reduce)}/s of gradients, {len(measured.hosts)} ranks"
        yield Finding(_TOPIC, "all-reduce", value)


def _is_inside(measured: Measured, link: Link) -> bool:
    return measured.hosts[link.first] == measured.hosts[link.second]


def _summary(name: str, links: Sequence[Link]) -> Iterator[Finding]:
    latencies, bandwidths = [one.latency for one in links], [one.bandwidth for one in links]
    slow = min(links, key=lambda one: one.bandwidth)
    late = max(links, key=lambda one: one.latency)
    is_slow = slow.bandwidth * _SLOWER < median(bandwidths)
    advice = "look at that link's cable, switch or interface, or give its ranks places that send less to each other"
    micro = [f"{1e6 * value:.0f}" for value in (min(latencies), median(latencies), max(latencies))]
    yield Finding(
        _TOPIC, f"latency, {name}", f"{' / '.join(micro)} us (least, median, most: {late.first}-{late.second})"
    )
    speeds = [gibibytes(value) + "/s" for value in (min(bandwidths), median(bandwidths), max(bandwidths))]
    value = f"{' / '.join(speeds)} (least: {slow.first}-{slow.second}, median, most)"
    yield Finding(_TOPIC, f"bandwidth, {name}", value).flagged_if(is_slow, "note", advice)


def matrix(measured: Measured) -> list[list[str]]:
    """Rows of a table: latency in microseconds above the diagonal, bandwidth in MiB/s below it."""
    size = len(measured.hosts)
    cells = [["" for _ in range(size)] for _ in range(size)]
    for link in measured.links:
        cells[link.first][link.second] = f"{1e6 * link.latency:.0f} us"
        cells[link.second][link.first] = f"{link.bandwidth / 2**20:.0f} MiB/s"
    return [[str(rank), *row] for rank, row in enumerate(cells)]


_TIMEOUT = timedelta(seconds=60)
_SMALL, _LARGE = 8, 4 * 2**20
_ROUNDS, _LARGE_ROUNDS = 30, 5
_MOST_ALL_PAIRS = 8
"""ranks up to which each pair is measured"""


def pairs_of(world_size: int) -> list[tuple[int, int]]:
    """The pairs that are measured: all of few ranks; of many, neighbours and those half of the ranks apart.

    Example:
        >>> pairs_of(3), len(pairs_of(64))
        ([(0, 1), (0, 2), (1, 2)], 96)
    """
    if world_size <= _MOST_ALL_PAIRS:
        return list(combinations(range(world_size), 2))
    neighbours = {tuple(sorted((rank, (rank + 1) % world_size))) for rank in range(world_size)}
    apart = {(rank, rank + world_size // 2) for rank in range(world_size // 2)}
    return sorted((a, b) for a, b in neighbours | apart)


def measure(rank: int, world_size: int, tell: Any = None) -> Measured:
    """Join the process group, measure, and leave. Called by all ranks; the result is the same on all.

    Args:
        tell: what this rank tells the others besides.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", rank)):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        world = available(dist.group.WORLD, "ranks measure links once they have joined")
        hosts = all_gather_objects(world, os.uname().nodename)
        links = [link for a, b in pairs_of(world_size) for link in _pair(rank, a, b, device)]
        gathered = all_gather_objects(world, links)
        values = torch.zeros(_LARGE // 4, device=device)
        reduced = _LARGE / _seconds(lambda: dist.all_reduce(values), _LARGE_ROUNDS, device)
        given = all_gather_objects(world, tell)
    finally:
        dist.destroy_process_group()
    return Measured(device.type, hosts, [link for own in gathered for link in own], reduced, given)


def _pair(rank: int, a: int, b: int, device: torch.device) -> Iterator[Link]:
    """Send back and forth between two ranks, while the others wait; rank `a` has the result."""
    if rank in (a, b):
        other = b if rank == a else a
        latency = _one_way(_SMALL, _ROUNDS, is_first=rank == a, other=other, device=device)
        seconds = _one_way(_LARGE, _LARGE_ROUNDS, is_first=rank == a, other=other, device=device)
        if rank == a:
            yield Link(a, b, latency, _LARGE / max(seconds - latency, 1e-9))
    dist.barrier()


def _seconds(run: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The median of the seconds that it takes; the first rounds make the connection, and aren't counted."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _one_way(num_bytes: int, rounds: int, *, is_first: bool, other: int, device: torch.device) -> float:
    """Half of the seconds there and back."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for sends in (is_first, not is_first):
            dist.send(buffer, other) if sends else dist.recv(buffer, other)

    return _seconds(there_and_back, rounds, device) / 2


def main(path: str) -> None:
    """Measure as one of the ranks that the environment describes; rank 0 writes the result."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    measured = measure(rank, world_size)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(asdict(measured), file)


if __name__ == "__main__":
    main(sys.argv[1])
