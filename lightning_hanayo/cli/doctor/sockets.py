"""The network: names that resolve, interfaces that exist, a port that is free, and connections that come through."""

import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from lightning_hanayo.cli.doctor.finding import Finding, Level

_TOPIC = "network"
_TIMEOUT = 3.0
"""seconds for a connection"""
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Network:
    """What this host says of itself."""

    hostname: str
    address: str
    """of the hostname; "" if it doesn't resolve"""
    interfaces: Collection[str]
    connects: bool
    """whether a process of this host reaches another one by that address"""


def look() -> Network:
    """Ask the operating system."""
    hostname = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = ""
    interfaces = [name for _, name in socket.if_nameindex()]
    return Network(hostname, address, interfaces, _connects(address or "127.0.0.1"))


def examine(network: Network, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """What processes that want to meet here are to know."""
    name = f"{network.hostname}, {network.address or 'which has no address'}"
    chosen = bool(environment.get("GLOO_SOCKET_IFNAME"))
    advice = "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface: gloo looks the name up"
    level: Level = "note" if chosen else "problem"
    hostname = Finding(_TOPIC, "hostname", name).flagged_if(not network.address, level, advice)
    only_here = network.address.startswith("127.") and not chosen
    advice = "no matter on one node; with several set GLOO_SOCKET_IFNAME to the interface that the others reach"
    yield hostname.flagged_if(only_here, "note", advice)
    yield Finding(_TOPIC, "interfaces", ", ".join(sorted(network.interfaces)) or "none")
    for variable in _CHOICES:
        if environment.get(variable):
            yield _interface(variable, environment[variable], network.interfaces)
    if not network.connects:
        advice = "let the firewall accept connections of this host to itself; ranks use ports that are free"
        where = network.address or "127.0.0.1"
        yield Finding(_TOPIC, "connections", f"none from this host to itself by {where}", "problem", advice)
    if "MASTER_ADDR" in environment:
        yield _main_address(environment)


def _interface(variable: str, wanted: str, interfaces: Collection[str]) -> Finding:
    """gloo takes a list of names; NCCL takes prefixes, with = for whole names and ^ for all others."""
    is_nccl = variable.startswith("NCCL")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    is_prefix = is_nccl and "=" not in wanted[:2]
    found = [one for one in interfaces if any(one.startswith(n) if is_prefix else one == n for n in names)]
    left = [one for one in interfaces if one not in found] if is_nccl and wanted.startswith("^") else found
    if left:
        return Finding(_TOPIC, variable, f"{wanted}: {', '.join(sorted(left))}")
    known = ", ".join(sorted(interfaces))
    return Finding(_TOPIC, variable, f"{wanted}: no such interface", "problem", f"choose of {known}, or unset it")


def _main_address(environment: Mapping[str, str]) -> Finding:
    address, port = environment["MASTER_ADDR"], environment.get("MASTER_PORT", "")
    where = f"{address}:{port}"
    if not port.isdigit() or not 0 < int(port) < 2**16:
        advice = "set it to a free port from 1024 to 65535, the same on all nodes"
        return Finding(_TOPIC, "MASTER_PORT", port or "not set", "problem", advice)
    try:
        family, _, _, _, target = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        advice = "set it to the name or address of the node of rank 0"
        return Finding(_TOPIC, "MASTER_ADDR", f"{address}: {error.strerror or error}", "problem", advice)
    is_main = environment.get("RANK", environment.get("NODE_RANK", "0")) == "0"
    if "TORCHELASTIC_RUN_ID" in environment or not is_main:
        reached = _reaches(family, target)
        advice = "it listens once rank 0 has started; if it has, look at the firewall between the nodes"
        found = Finding(_TOPIC, "MASTER_ADDR", f"{where} {'answers' if reached else 'does not answer'}")
        return found.flagged_if(not reached, "note", advice)
    try:
        with socket.create_server(("", int(port)), family=family):
            return Finding(_TOPIC, "MASTER_PORT", f"{where} is free")
    except OSError as error:
        advice = "choose another MASTER_PORT, or end the process that has it: ss -ltnp"
        return Finding(_TOPIC, "MASTER_PORT", f"{where}: {error.strerror or error}", "problem", advice)


def _reaches(family: int, target: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_TIMEOUT)
        return client.connect_ex(target) == 0


def _connects(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            return _reaches(family, server.getsockname())
    except OSError:
        return sys.platform == "darwin"  # where a host may have an address that it can't listen on
