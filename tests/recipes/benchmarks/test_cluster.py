"""The cluster connects hosts by links of a set rate, and removes them at the end.

host 0 --- 80 Mbit/s --- bridge --- 80 Mbit/s --- host 1            1 MB: 0.1 s, both ways at once
"""

import os
import shutil
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks import tensor3d
from recipes.benchmarks.cluster import Cluster, Link, received, refusal
from recipes.benchmarks.schemes.dimensions import Wire
from recipes.benchmarks.schemes.log import Log
from tests.harness.limits import real_seconds

MEGABYTE, LINK = 10**6, Link(80)
possible = pytest.mark.skipif(refusal() is not None, reason=f"no cluster here: {refusal()}")


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def exchange(rank: int, size: int) -> tuple[float, float, int]:
    """Returns the start and end times, and the bytes received."""
    wire = Wire(dist.group.WORLD, 2, rank, Log())
    part = torch.full((size // 4,), rank, dtype=torch.float32)
    before = received()
    dist.barrier()
    start = time.monotonic()
    whole = wire.all_gather(part).wait()
    assert whole[:, -1].tolist() == [0.0, 1.0]
    return start, time.monotonic(), received() - before


@pytest.mark.thorough
@possible
def test_a_link_has_the_set_rate() -> None:
    with Cluster(2, LINK) as cluster:
        assert all(host in names() for host in cluster.hosts)
        found = cluster.run(exchange, MEGABYTE, timeout=real_seconds(60))
    assert not any(host in names() for host in cluster.hosts)
    starts, ends, counts = zip(*found, strict=True)
    assert max(ends) - min(starts) > 0.9 * MEGABYTE / LINK.bytes_per_second
    assert all(MEGABYTE < count < 1.05 * MEGABYTE for count in counts)


@possible
def test_nothing_is_left_after_an_interrupt() -> None:
    other = Cluster(1, LINK)
    with other, pytest.raises(KeyboardInterrupt), Cluster(1, LINK) as cluster:
        raise KeyboardInterrupt
    assert not {*cluster.hosts, *other.hosts} & set(names().split())
    assert set(cluster.hosts).isdisjoint(other.hosts)


@possible
def test_a_failed_cluster_raises_and_is_removed() -> None:
    cluster = Cluster(1, Link(80, mtu=7))
    with pytest.raises(HanayoError, match="mtu"), cluster:
        pass
    assert cluster.hosts[0] not in names()


def test_without_root_it_prints_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tensor3d.main(["--check"]) == 3
    assert capsys.readouterr().err == "skipped: network namespaces need root\n"


def test_without_iproute2_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert tensor3d.main(["--check"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("skipped: tc not found: install iproute2 (") and said.count("\n") == 1
    assert "Debian and Ubuntu: apt install iproute2" in said and "Fedora: dnf install iproute " in said
