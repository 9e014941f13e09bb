"""What the links between ranks can do: their latency and bandwidth, and the worst pair of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_hanayo.cli.doctor.finding import Finding, gibibytes

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
