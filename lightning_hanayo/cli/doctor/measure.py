"""Measures what a device, the host and the links can do, for `hanayo plan`: products, memory, messages, calls."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from statistics import median

import torch

from lightning_hanayo.cli.doctor.host import Finding
from lightning_hanayo.cli.doctor.links import Measured, timed
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.machine import Link, Machine

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""n of the products of two n x n matrices"""
_TOPIC = "measured for hanayo plan"
_DTYPES = {"cpu": ("bfloat16", "float32"), "cuda": ("bfloat16", "float16", "float32")}
_COPIED = 1 << 28
"""bytes of the copy by which memory is measured"""
_REPEATS, _LONG = 3, 1.0
"""products of each size, and seconds from which on larger ones aren't measured"""
_CALLS = 2000
_COLLECTIVE = 25e-6
"""seconds of the host for a collective on a GPU's stream: assumed, as in docs/benchmarks/h100.md"""
_ACTION = 3e-4
"""seconds of the runtime for an action: docs/benchmarks/action.md has 220 to 380 us"""


def measure(
    found: Measured | None,
    *,
    network: float | None = None,
    say: Callable[[str], object] = bool,
    sizes: Sequence[int] = SIZES,
) -> Machine:
    """Measure this process's device, and take the links from what was measured between ranks.

    Args:
        found: links between ranks; the ranks on the first host are a node.
        network: bytes per second between nodes, where only one node was measured; None: as within it.
        say: called with what is being measured.
        sizes: of the matrices.

    Raises:
        HanayoError: no link was measured.
    """
    if found is None or not found.links:
        way_out = "with --devices N it measures those between N processes of this host; under torchrun or srun, between"
        raise HanayoError(f"--measure needs links: {way_out} their ranks")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inside, outside = (list(found.between(nodes=is_between).values()) for is_between in (False, True))
    within, is_one_node = _median(inside or outside), not outside
    between = within if network is None else Link(within.latency, network)
    if outside:
        between = _median(outside)
    rates = {}
    for dtype in _DTYPES[device.type]:
        say(f"products in {dtype}")
        rates[dtype] = tuple(_products(getattr(torch, dtype), device, sizes))
    say("memory and calls")
    per_node = found.hosts.count(found.hosts[0])
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    nodes = "the links between nodes were not measured" if is_one_node else f"{len(set(found.hosts))} nodes"
    given = f", but given as {network / 1e9:g} GB/s" if is_one_node and network is not None else ""
    return Machine(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        ranks_per_node=per_node,
        memory=float(_memory(device, per_node)),
        matmul=rates,
        memory_bandwidth=_memory_bandwidth(device),
        within_node=within,
        between_nodes=between,
        is_asynchronous=device.type == "cuda",
        host_call=_host_call(device),
        host_collective=_COLLECTIVE if device.type == "cuda" else 0.0,
        host_action=_ACTION,
        source=f"measured on {date.today()} by hanayo doctor --measure, torch {torch.__version__}, "
        f"{os.uname().nodename}{threads}; {nodes}{given}",
    )


def examine(machine: Machine, path: str) -> Iterator[Finding]:
    """What was measured, in lines."""
    for dtype, rates in machine.matmul.items():
        shown = ", ".join(f"{rate / 1e12:.3g} ({size:.0f})" for size, rate in rates)
        yield Finding(_TOPIC, f"products, {dtype}", f"{shown} TFLOP/s (n x n)")
    yield Finding(_TOPIC, "memory", f"{machine.memory_bandwidth / 1e9:.1f} GB/s")
    for name, link in (("within a node", machine.within_node), ("between nodes", machine.between_nodes)):
        yield Finding(_TOPIC, f"links {name}", f"{1e6 * link.latency:.0f} us, {link.bandwidth / 1e9:.3g} GB/s")
    yield Finding(_TOPIC, "host", f"{1e6 * machine.host_call:.1f} us per call")
    yield Finding(_TOPIC, "written", path)


def _median(links: Sequence[Link]) -> Link:
    return Link(median(one.latency for one in links), median(one.bandwidth for one in links))


def _products(dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> Iterator[tuple[float, float]]:
    for size in sizes:
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = max(1e-9, min(timed(lambda a=a, b=b: a @ b, _REPEATS, device)))  # type: ignore[misc]
        yield float(size), 2.0 * size**3 / seconds
        if seconds * _REPEATS > _LONG:
            break


def _memory_bandwidth(device: torch.device) -> float:
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / max(1e-9, min(timed(lambda: target.copy_(source), _REPEATS, device)))


def _host_call(device: torch.device) -> float:
    """Seconds that the host takes to start a small operation, with its part of autograd."""
    x = torch.ones(1, device=device, requires_grad=True)
    start, y = time.perf_counter(), x
    for _ in range(_CALLS):
        y = y + x
    return (time.perf_counter() - start) / _CALLS


def _memory(device: torch.device, per_node: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
