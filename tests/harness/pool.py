"""Runs functions on up to eight live worker processes, one per rank, test after test.

    pool.run(4, function, *arguments)   ->   [result of rank 0, ..., result of rank 3]

A run takes milliseconds: the workers are forks of a process that has imported torch and Lightning (`fork_server.py`).
A Lightning `Trainer(devices=4)` in them finds `LOCAL_RANK` set and starts no processes of its own.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from tests.harness.limits import CLOCK, VARIABLE, Deadline, real_seconds, wait_until
from tests.harness.worker import DUMP_STACKS, Failure, Task

MAX_WORKERS = 8
GRACE_S = 10.0  # scaled seconds for the other ranks to end after the first failure
SHOWN_OUTPUT = 4000  # bytes of a rank's output in an error
SHOWN_STACKS = 20_000  # the same if it timed out: a Trainer's stacks are deep
FIRST_PORT, LAST_PORT, BLOCK = 20000, 32000, 200  # a port is used again after 199 runs
ROOT = Path(__file__).parents[2]
CONSEQUENCES = ("PeerFailed",)  # errors of ranks that end because another one failed


class RunFailed(Exception):
    """At least one rank failed. `failures` are sorted: the cause first, then its consequences."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.kind in CONSEQUENCES, failure.when))
        super().__init__("\n".join(str(failure) for failure in self.failures))

    @property
    def first(self) -> Failure:
        """The failure that came before the others."""
        return self.failures[0]


@dataclass(frozen=True)
class _Worker:
    pid: int
    connection: Connection
    log: IO[bytes]

    def printed(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def output(self, since: int, at_most: int = SHOWN_OUTPUT) -> str:
        size = self.printed()
        start = max(since, size - at_most)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Pool:
    """Workers and their fork server. They start when first needed, and end with the pool or with this process.

    Example:
        >>> Pool().run(2, os.getenv, "RANK")
        ['0', '1']
    """

    def __init__(self, *, imports: bool = True) -> None:
        """Without `imports` the workers start at once, for functions that need neither torch nor Lightning."""
        self._imports = imports
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._workers: list[_Worker] = []
        self._ports: _Ports | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="pool-")
        atexit.register(self.close)

    def start(self) -> None:
        """Start the fork server, which begins to import; returns immediately."""
        if self._fork_server is not None and self._fork_server.poll() is None:
            return
        self._control, other_end = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        # NVML counts the GPUs without initializing CUDA, which can't be used after a fork
        environment = os.environ | threads | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        # for its log messages torch resolves ::ffff:127.0.0.1; don't wait 5 s for an answer
        environment["RES_OPTIONS"] = "timeout:1 attempts:1"
        command = [sys.executable, "-m", "tests.harness.fork_server", str(other_end.fileno())]
        command += ["import"] if self._imports else []
        self._fork_server = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[other_end.fileno()], stdin=subprocess.DEVNULL
        )
        other_end.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """The results of `function(*arguments)`, a function of a module, on `world_size` ranks.

        Each rank finds MASTER_ADDR, a fresh MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment.

        Raises:
            RunFailed: a rank raised, died, left a thread running, or took longer than `timeout` scaled seconds.
        """
        __tracebackhide__ = True  # so that pytest shows the test's line and the rank's traceback
        requests = self._requests(world_size, function, arguments)
        self._start_workers(world_size)
        workers = self._workers[:world_size]
        printed = [worker.printed() for worker in workers]
        pending = {worker.connection: rank for rank, worker in enumerate(workers)}
        results: list[Any] = [None] * world_size
        failures: list[Failure] = []
        deadline = Deadline(timeout)
        try:
            for worker, request in zip(workers, requests, strict=True):
                worker.connection.send_bytes(request)
            while pending:
                ready = wait(list(pending), deadline.pause())
                if not ready and deadline.over():
                    break
                for connection in ready:
                    assert isinstance(connection, Connection)
                    rank = pending.pop(connection)
                    status, value = self._receive(rank, workers[rank], printed[rank])
                    if status == "ok":
                        results[rank] = value
                    else:
                        failures.append(value)
                        deadline = deadline.at_most(GRACE_S)
            if pending:
                failures += self._timed_out(workers, printed, pending, timeout)
        finally:
            for worker in [workers[rank] for rank in pending.values()]:
                self._discard(worker)
            for failure in failures:
                if failure.kind == "RuntimeError" and failure.message.startswith("threads still run"):
                    self._discard(workers[failure.rank])
        if failures:
            raise RunFailed(failures)
        return results

    def end_workers(self) -> None:
        """End all workers; the next run starts new ones, which know nothing of a GPU yet."""
        for worker in list(self._workers):
            self._discard(worker)

    def close(self) -> None:
        """End all workers and the fork server."""
        atexit.unregister(self.close)
        self._end_fork_server()
        self._directory.cleanup()

    def import_in_workers(self) -> None:
        """From now on let each worker import for itself, if it can't use what the fork server has imported."""
        self._end_fork_server()
        self._imports = False

    def _end_fork_server(self) -> None:
        self.end_workers()
        if self._control is not None:
            self._control.close()
        if self._fork_server is not None:
            try:
                self._fork_server.wait(5.0)
            except subprocess.TimeoutExpired:
                self._fork_server.kill()
                self._fork_server.wait()
        if self._ports is not None:
            self._ports.close()
        self._fork_server = self._control = self._ports = None

    def _requests(self, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[bytes]:
        self._ports = self._ports or _Ports()
        port = str(self._ports.next())
        requests = []
        for rank in range(world_size):
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),  # tells Lightning that the processes are already started
                "NODE_RANK": "0",
                "WORLD_SIZE": str(world_size),
                VARIABLE: str(CLOCK.factor),
            }
            task = pickle.dumps(Task(function, arguments, environment, list(warnings.filters)))
            requests.append(pickle.dumps((rank, sys.path, self._directory.name, task)))
        return requests

    def _receive(self, rank: int, worker: _Worker, printed: int) -> tuple[str, Any]:
        try:
            status, value = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            output, code = worker.output(printed), self._discard(worker)
            reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return "failed", Failure(rank, "died", f"the process ended {reason}", when=time.monotonic(), output=output)
        if status == "failed":
            value = replace(value, output=worker.output(printed))
        return status, value

    def _timed_out(
        self, workers: list[_Worker], printed: list[int], pending: dict[Connection, int], timeout: float
    ) -> list[Failure]:
        before = {rank: workers[rank].printed() for rank in pending.values()}
        for rank in before:
            workers[rank].signal(DUMP_STACKS)
        wait_until(lambda: all(workers[rank].printed() > size for rank, size in before.items()), 2.0)
        time.sleep(real_seconds(0.1))  # one process writes its stacks in several pieces
        return [
            Failure(
                rank,
                "timed out",
                f"no answer within {timeout:g} s, or {GRACE_S:g} s after another rank's failure; its stacks:",
                when=time.monotonic(),
                output=workers[rank].output(printed[rank], SHOWN_STACKS),
            )
            for rank in sorted(pending.values())
        ]

    def _start_workers(self, size: int) -> None:
        assert 1 <= size <= MAX_WORKERS, f"the pool has 1 to {MAX_WORKERS} workers, not {size}"
        self.start()
        while len(self._workers) < size:
            self._workers.append(self._fork())

    def _fork(self) -> _Worker:
        assert self._control is not None
        pool_end, other_end = socket.socketpair()
        log = tempfile.TemporaryFile(mode="ab+", buffering=0)  # noqa: SIM115
        socket.send_fds(self._control, [b"fork"], [other_end.fileno(), log.fileno()])
        other_end.close()
        pid = self._answer()
        worker = _Worker(pid, Connection(pool_end.detach()), log)
        assert worker.connection.recv_bytes() == b"ready"
        return worker

    def _discard(self, worker: _Worker) -> int:
        """Kill a worker; returns its exit code (minus the signal's number, if a signal ended it)."""
        if worker not in self._workers:
            return 0
        self._workers.remove(worker)
        worker.connection.close()
        worker.signal(signal.SIGKILL)
        worker.log.close()
        assert self._control is not None
        self._control.sendall(b"reap %d" % worker.pid)
        return self._answer()

    def _answer(self) -> int:
        assert self._control is not None
        answer = self._control.recv(64)
        assert answer, "the fork server has ended; its error is above"
        return int(answer)


class _Ports:
    """Free ports, below the range of outgoing connections, so that no other process takes one before it is used.

    They are of a block of ports that belongs to this pool alone: it holds the block's first port until it is closed.
    """

    def __init__(self) -> None:
        block, self._first = next(
            (block, held) for block in range(FIRST_PORT, LAST_PORT, BLOCK) if (held := _hold(block)) is not None
        )
        self._others = cycle(range(block + 1, block + BLOCK))

    def next(self) -> int:
        for port in self._others:
            held = _hold(port)
            if held is not None:
                held.close()
                return port
        raise AssertionError

    def close(self) -> None:
        self._first.close()


def _hold(port: int) -> socket.socket | None:
    """A socket that is bound to the port; None if it is in use."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return None
    return holder
