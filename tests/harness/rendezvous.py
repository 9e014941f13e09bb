"""Makes TCPStore clients connect only once rank 0 listens, so that none is refused.

After a refused connection torch's client sleeps for 0.25 to 0.75 s, which happened in one run in four.
"""

import importlib
import time
from pathlib import Path
from typing import Any

TABLES = {
    Path("/proc/net/tcp"): "0" * 8,
    Path("/proc/net/tcp6"): "0" * 32,
}  # on Linux only; on other systems clients don't wait
"""each with the remote address of a listening socket"""
PAUSE_S, LIMIT_S = 0.001, 10.0


def wait_for_listener() -> None:
    """Patch TCPStore in this process and its forks: clients wait until the port has a listener."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # torch hides it behind a function
    store = rendezvous.TCPStore

    def connect(*args: Any, port: int, is_master: bool, **options: Any) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not is_master and not _listens(port) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return store(*args, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = connect


def _listens(port: int) -> bool:
    """Whether a socket of this machine listens on the port: a row like  `0: 00000000:4E20 00000000:0000 0A ...`."""
    tables = {table.read_text(): no_address for table, no_address in TABLES.items() if table.exists()}
    return not tables or any(f":{port:04X} {no_address}:0000 0A" in rows for rows, no_address in tables.items())
