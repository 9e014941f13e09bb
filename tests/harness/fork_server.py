"""Imports torch, Lightning and the strategy once, then forks the pool's workers.

    pytest ---socket---> fork server ---fork---> worker 0 ... worker 7
       \\____________________one socket each__________________/

Importing takes seconds, forking a tenth of one. The fork is safe because this process only imports: it never runs
autograd, gloo or CUDA. A worker's socket and log are sent as file descriptors, so that no file is left on the disk.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from functools import cache
from importlib.util import find_spec

from lightning_hanayo.monitor.processes import end_with_parent
from tests.harness.rendezvous import wait_for_listener
from tests.harness.worker import serve

FORK, REAP = b"fork", b"reap"
MODELS = ("gpt2", "llama", "bert")
PRELOAD = ("torch", "torch.distributed", "lightning.pytorch", "lightning_hanayo.strategy")


def main(descriptor: int, imports: bool) -> None:
    """Fork and reap workers as pytest asks, until it closes the socket; then kill all workers."""
    end_with_parent()  # on other systems when its socket is closed
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if imports:
        for name in PRELOAD:
            importlib.import_module(name)
        if find_spec("transformers") is not None:  # a machine with GPUs may have none
            for name in MODELS:
                importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        _cache_plugins()
        _search_briefly()
        wait_for_listener()
    gc.freeze()  # imported modules are not collected in workers, which would copy their memory
    children: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
            if not message:
                return
            command, _, argument = message.partition(b" ")
            if command == FORK:
                pid = _fork(control, *descriptors)
                children.add(pid)
                control.sendall(b"%d\n" % pid)
            elif command == REAP:
                pid = int(argument)
                children.discard(pid)
                control.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        for pid in children:
            os.killpg(pid, signal.SIGKILL)


def _cache_plugins() -> None:
    """Every Trainer searches all installed packages for callbacks, which takes a tenth of a small run's time."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


def _search_briefly() -> None:
    """Any order of a schedule trains alike, and to look for the best one takes a tenth of a small run's time."""
    from lightning_hanayo.schedule.search import search

    search.MAX_RUNS = 20


def _fork(control: socket.socket, connection: int, log: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            serve(connection, log)
        finally:
            os._exit(1)
    os.close(connection)
    os.close(log)
    return pid


if __name__ == "__main__":
    main(int(sys.argv[1]), "import" in sys.argv[2:])
