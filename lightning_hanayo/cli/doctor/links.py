"""Measures the links between ranks, and sums them up: latency, bandwidth, and the slowest pair.

The ranks are processes that it starts on this host, or those that torchrun or SLURM has started. They send back and
forth in pairs, one pair after the other.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_hanayo.checking.case import RankFailure
from lightning_hanayo.checking.trainings import run
from lightning_hanayo.cli.doctor.host import Finding, gibibytes
from lightning_hanayo.errors import available, is_debugging
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.planner.machine import Link

_TOPIC = "links"
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_TIMEOUT = timedelta(seconds=60)
_SMALL, _LARGE = 8, 4 * 2**20
_ROUNDS, _LARGE_ROUNDS = 30, 5
_MOST_ALL_PAIRS = 8
"""ranks up to which each pair is measured"""
_SLOWER = 4.0
"""times as slow as the median, from which on a pair is named as a problem of its own"""


@dataclass(frozen=True)
class Measured:
    """What the ranks have measured together."""

    device: str
    """"cpu" or "cuda": where the messages were"""
    hosts: Sequence[str]
    """of each rank"""
    links: Mapping[tuple[int, int], Link]
    """by the two ranks"""
    all_reduce: float
    """bytes of a gradient that all ranks reduce per second"""
    given: Sequence[Any] = ()
    """what each rank has told the others"""

    def between(self, *, nodes: bool) -> dict[tuple[int, int], Link]:
        """The links between nodes, or those inside of nodes."""
        hosts = self.hosts
        return {pair: link for pair, link in self.links.items() if (hosts[pair[0]] != hosts[pair[1]]) is nodes}


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank of this process and the number of all, if torchrun or SLURM has started it.

    A shell in a job of SLURM is none of its ranks, as for Lightning.
    """
    for names in _LAUNCHERS:
        is_shell = names[0].startswith("SLURM") and environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if all(name in environment for name in names) and not is_shell:
            return int(environment[names[0]]), int(environment[names[1]])
    return None


def measure_given(rank: int, world_size: int, findings: Sequence[Finding]) -> Measured | Finding:
    """Measure among the ranks that a launcher has started, and tell each other what they have found. Called by all."""
    if "MASTER_ADDR" not in os.environ:  # SLURM gives none
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        environment = SLURMEnvironment()
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
    try:
        return measure(rank, world_size, findings)
    except RuntimeError as error:  # torch has no narrower type for what it can't reach
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"rank {rank} has not met the others at {where}: {str(error).splitlines()[0]}"
        return Finding(_TOPIC, f"{world_size} ranks", text, "problem", "look at the firewall between the nodes")


def measure_here(num_processes: int, timeout: float) -> Measured | Finding:
    """Start so many processes on this host, which measure. None of them is left behind.

    Args:
        timeout: seconds until they are killed.

    Returns:
        What they have measured, or why they couldn't.
    """
    results = run(num_processes, measure_started, num_processes, timeout=timeout)
    failures = [one for one in results if isinstance(one, RankFailure)]
    if not failures:
        measured: Measured = results[0]
        return measured
    cause = min(failures, key=lambda one: one.kind == "timed out")
    printed = cause.trace.strip().splitlines() if cause.kind == "died" else []
    text = ": ".join([f"rank {cause.rank}", cause.message, *printed[-1:]])
    if is_debugging():
        print(*(one.trace for one in failures), sep="\n", file=sys.stderr)
    advice = "run it again with HANAYO_DEBUG=1 to see what the processes print"
    return Finding(_TOPIC, f"{num_processes} processes", text, "problem", advice)


def measure_started(world_size: int) -> Measured:
    """Measure as one of the processes that `measure_here` has started."""
    return measure(int(os.environ["RANK"]), world_size)


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
    device, local_rank = torch.device("cpu"), int(os.environ.get("LOCAL_RANK", rank))
    if torch.cuda.is_available() and torch.cuda.device_count() > local_rank:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        world = available(dist.group.WORLD, "ranks measure links once they have joined")
        hosts = all_gather_objects(world, os.uname().nodename)
        own: dict[tuple[int, int], Link] = {}
        for a, b in pairs_of(world_size):  # one after the other: the others wait
            if rank in (a, b):
                other = b if rank == a else a
                latency = _one_way(_SMALL, _ROUNDS, is_first=rank == a, other=other, device=device)
                seconds = _one_way(_LARGE, _LARGE_ROUNDS, is_first=rank == a, other=other, device=device)
                if rank == a:
                    own[a, b] = Link(latency, _LARGE / max(seconds - latency, 1e-9))
            dist.barrier()
        links = {pair: link for each in all_gather_objects(world, own) for pair, link in each.items()}
        values = torch.zeros(_LARGE // 4, device=device)
        reduced = _LARGE / median(timed(lambda: dist.all_reduce(values), _LARGE_ROUNDS, device, warm_up=2))
        given = all_gather_objects(world, tell)
    finally:
        dist.destroy_process_group()
    return Measured(device.type, hosts, links, reduced, given)


def _one_way(num_bytes: int, rounds: int, *, is_first: bool, other: int, device: torch.device) -> float:
    """Half of the seconds there and back."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for sends in (is_first, not is_first):
            dist.send(buffer, other) if sends else dist.recv(buffer, other)

    return median(timed(there_and_back, rounds, device, warm_up=2)) / 2


def timed(run: Callable[[], object], rounds: int, device: torch.device, *, warm_up: int = 1) -> list[float]:
    """The seconds of each round. Those before them, which make connections and fill caches, aren't counted."""
    times = []
    for _ in range(warm_up + rounds):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warm_up:]


def examine(measured: Measured) -> Iterator[Finding]:
    """Sum up the links in a node and those between nodes, and name slow ones."""
    for where, is_between in (("in a node", False), ("between nodes", True)):
        if links := measured.between(nodes=is_between):
            yield from _summary(f"{len(links)} pairs {where} ({measured.device})", links)
    if len(measured.hosts) > 1:
        value = f"{gibibytes(measured.all_reduce)}/s of gradients, {len(measured.hosts)} ranks"
        yield Finding(_TOPIC, "all-reduce", value)


def _summary(name: str, links: Mapping[tuple[int, int], Link]) -> Iterator[Finding]:
    latencies, bandwidths = [one.latency for one in links.values()], [one.bandwidth for one in links.values()]
    slow, late = min(links, key=lambda pair: links[pair].bandwidth), max(links, key=lambda pair: links[pair].latency)
    micro = [f"{1e6 * value:.0f}" for value in (min(latencies), median(latencies), max(latencies))]
    value = f"{' / '.join(micro)} us (least, median, most: {late[0]}-{late[1]})"
    yield Finding(_TOPIC, f"latency, {name}", value)
    speeds = [gibibytes(value) + "/s" for value in (min(bandwidths), median(bandwidths), max(bandwidths))]
    value = f"{' / '.join(speeds)} (least: {slow[0]}-{slow[1]}, median, most)"
    advice = "look at that link's cable, switch or interface, or give its ranks places that send less to each other"
    is_slow = links[slow].bandwidth * _SLOWER < median(bandwidths)
    yield Finding(_TOPIC, f"bandwidth, {name}", value).flagged_if(is_slow, "note", advice)
