"""Emulates a cluster: hosts on one machine, each a network namespace with a link of set bandwidth to a common switch.

 host 0 (eth0 10.77.0.1) --- veth ---+
 host 1 (eth0 10.77.0.2) --- veth ---+ bridge, in a namespace of its own        both ends of each veth: tbf, so that a
 ...                                 |                                          host neither sends nor receives faster
 host 7 (eth0 10.77.0.8) --- veth ---+

Nothing is added to the machine's own network: deleting the namespaces removes everything.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.harness import Findings, ProcessOptions, Work, run_ranks, uninterrupted

DEVICE = "eth0"
_NUMBERS = count()
_CLONE_NEWNET = 0x40000000
_TCP = {
    "tcp_congestion_control": "reno",  # the links lose nothing
    "tcp_slow_start_after_idle": "0",  # keep the rate after a pause for computing
    "tcp_limit_output_bytes": "16384",  # connections share the link evenly, with short queues
}
"""set in a host's namespace, not for the machine"""


@dataclass(frozen=True)
class Link:
    """A host's connection to the switch.

    Args:
        mbit: bandwidth in each direction, in megabits per second.
        burst_kb: how much may be sent at once after a pause, in kilobytes.
        mtu: largest packet, in bytes. Large ones are usual in clusters.

    Connections share the link packet by packet: one of them sends at most a burst before the next one's turn.
    """

    mbit: float
    burst_kb: int = 16
    mtu: int = 9000

    def about(self, hosts: int) -> str:
        """Such hosts, in words."""
        burst = f"tbf, burst {self.burst_kb} KB, MTU {self.mtu}"
        return f"gloo, {hosts} network namespaces, {self.mbit:g} Mbit/s each way ({burst})"

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth in each direction; packet headers count, too."""
        return self.mbit * 1e6 / 8


def checked(errors: Mapping[str, float]) -> Findings:
    """Lists errors of computed values; the exit code is 1 if one isn't that of rounding."""
    text = "\n".join(f"{name:56} {error:.1e}" for name, error in errors.items())
    return Findings(text, errors, code=0 if max(errors.values()) < 1e-10 else 1)


def refusal() -> str | None:
    """Return why this machine can't run a cluster, or None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        install = "Debian and Ubuntu: apt install iproute2; Fedora: dnf install iproute iproute-tc"
        return f"{' and '.join(missing)} not found: install iproute2 ({install})"
    try:
        with Cluster(1, Link(100)):
            return None
    except HanayoError as error:
        return str(error)


class Cluster:
    """A context manager that creates the hosts on entry and removes them on exit, also after an error.

    Raises:
        HanayoError: a namespace or a link could not be created.
    """

    def __init__(self, num_hosts: int, link: Link) -> None:
        prefix = f"hanayo-{os.getpid()}-{next(_NUMBERS)}"
        self.link = link
        self.hosts = tuple(f"{prefix}-{host}" for host in range(num_hosts))
        self._hub = f"{prefix}-hub"
        self._made: list[str] = []

    def __enter__(self) -> "Cluster":
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def _build(self) -> None:
        for name in (self._hub, *self.hosts):
            self._made.append(name)  # first, so that an interrupt right after leaves nothing behind
            _run("ip", "netns", "add", name)
        link = self.link
        mtu = link.mtu
        _batch("ip", self._hub, [f"link add br0 mtu {mtu} type bridge", "link set br0 up"])
        for port, host in enumerate(self.hosts):
            wire = f"link add p{port} mtu {mtu} type veth peer name {DEVICE} mtu {mtu} netns {host}"
            _batch("ip", self._hub, [wire, f"link set p{port} master br0 up"])
            _batch(
                "ip", host, [f"addr add {_address(port)}/24 dev {DEVICE}", f"link set {DEVICE} up", "link set lo up"]
            )
            _batch("ip", host, [f"link set {DEVICE} gso_max_size {link.burst_kb * 1024}"])
            _batch("tc", host, [self._shape(DEVICE)])
            _batch("tc", self._hub, [self._shape(f"p{port}")])

    def _shape(self, device: str) -> str:
        link = self.link
        return f"qdisc add dev {device} root tbf rate {link.mbit}mbit burst {link.burst_kb}kb limit 16mb"

    def remove(self) -> None:
        """Delete the namespaces. Safe to call again."""
        with uninterrupted():
            while self._made:
                subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True, check=False)

    def run(self, work: Work, argument: Any, timeout: float) -> list[Any]:
        """Run `work` in a process on each host, and return the results by rank.

        Raises:
            HanayoError: a rank failed, or `timeout` seconds passed; the message holds the rank's traceback.
        """
        options = [ProcessOptions(prepare=partial(_enter, host)) for host in self.hosts]
        return [result for _, result in run_ranks(work, argument, options, timeout)]


def _enter(host: str) -> None:
    """Move this process, which has one thread, to a host."""
    with (Path("/var/run/netns") / host).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {host}")
    for option, value in _TCP.items():
        if (at := Path("/proc/sys/net/ipv4") / option).exists():
            at.write_text(value)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import torch

    torch.set_flush_denormal(True)  # emulated products return uninitialised memory


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _run(*command: str, stdin: str = "") -> None:
    found = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if found.returncode:
        raise HanayoError(f"`{' '.join(command)}` failed: {(found.stderr or found.stdout).strip()}")


def _batch(tool: str, host: str, lines: Sequence[str]) -> None:
    _run(tool, "-n", host, "-batch", "-", stdin="\n".join(lines) + "\n")


def received() -> int:
    """Return the bytes that this process's host has received so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[0])
    raise HanayoError("this process isn't on a host of a cluster")
