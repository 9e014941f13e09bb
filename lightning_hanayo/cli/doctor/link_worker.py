"""One process of those that measure links: joins the others, and sends to each of them in turn.

Run by `hanayo doctor --devices N` as `python -m lightning_hanayo.cli.doctor.link_worker`, with torchrun's variables and
the path for rank 0's result; or called in the ranks that torchrun or SLURM has started.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_hanayo.cli.doctor.link_report import Link, Measured
from lightning_hanayo.errors import available
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects

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
        reduced = _all_reduce(device)
        given = all_gather_objects(world, tell)
    finally:
        dist.destroy_process_group()
    return Measured(device.type, hosts, [link for own in gathered for link in own], reduced, given)


def _pair(rank: int, a: int, b: int, device: torch.device) -> Iterator[Link]:
    """Send back and forth between two ranks, while the others wait; rank `a` has the result."""
    if rank in (a, b):
        other = b if rank == a else a
        latency = _round_trip(_SMALL, _ROUNDS, is_first=rank == a, other=other, device=device) / 2
        seconds = _round_trip(_LARGE, _LARGE_ROUNDS, is_first=rank == a, other=other, device=device) / 2
        if rank == a:
            yield Link(a, b, latency, _LARGE / max(seconds - latency, 1e-9))
    dist.barrier()


def _round_trip(num_bytes: int, rounds: int, *, is_first: bool, other: int, device: torch.device) -> float:
    """The median of the seconds there and back; the first rounds make the connection, and aren't counted."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        for sends in (is_first, not is_first):
            dist.send(buffer, other) if sends else dist.recv(buffer, other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def _all_reduce(device: torch.device) -> float:
    """Bytes of a gradient that are reduced per second."""
    values = torch.zeros(_LARGE // 4, device=device)
    times = []
    for _ in range(_LARGE_ROUNDS + 1):
        start = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return _LARGE / median(times[1:])


def main(path: str) -> None:
    """Measure as one of the ranks that the environment describes; rank 0 writes the result."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    measured = measure(rank, world_size)
    if rank == 0:
        with open(path, "w") as file:
            json.dump(asdict(measured), file)


if __name__ == "__main__":
    main(sys.argv[1])
