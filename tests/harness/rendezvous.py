"""A meeting of ranks: the others wait until rank 0 listens, milliseconds, instead of being refused.

torch's client sleeps 0.25 to 0.75 s after a refusal, and one run in four met one.
"""

import importlib
import time
from pathlib import Path
from typing import Any

TABLES = {Path("/proc/net/tcp"): "0" * 8, Path("/proc/net/tcp6"): "0" * 32}  # Linux only: elsewhere nobody waits
"""each with its address of nobody"""
PAUSE_S, PATIENCE_S = 0.001, 10.0


def come_in_time() -> None:
    """From now on this process's stores, and those of its forks, connect when somebody listens."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # torch hides it behind a function
    store = rendezvous.TCPStore

    def patient(*args: Any, port: int, is_master: bool, **options: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not is_master and not _listens(port) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return store(*args, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = patient


def _listens(port: int) -> bool:
    """Whether a socket of this machine listens there: a row like  `0: 00000000:4E20 00000000:0000 0A ...`."""
    tables = {table.read_text(): nobody for table, nobody in TABLES.items() if table.exists()}
    return not tables or any(f":{port:04X} {nobody}:0000 0A" in rows for rows, nobody in tables.items())
