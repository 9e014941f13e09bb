"""Lightning's subprocess launcher, with a check before it starts a process, and without processes left behind."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.failure import GRACE

KILL_AFTER = GRACE + 3.0
"""seconds after a process has failed until those that still run are killed"""

_ADVICE = (
    "A script that goes on after a failed run must catch the error on all ranks, by `except Exception`: ranks that "
    "didn't fail first get a PeerFailed."
)


class _Children:
    """The processes that this one has started. They run the same script, and so all runs of all its Trainers."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_running = False
        self._has_failed = False

    def watch(self, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Called once they have started."""
        self._processes = list(processes)
        threading.Thread(target=self._observe, daemon=True, name="hanayo-children").start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """While a run needs them all.

        Raises:
            HanayoError: some have ended.
        """
        codes = [process.poll() for process in self._processes]
        if any(code is not None for code in codes):
            raise HanayoError(
                f"processes that this one started have ended, with the exit codes {codes}. {_ADVICE} Start it again."
            )
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def end_at_exit(self) -> None:
        """After a failure: see to it that none of them outlives this process, also if it hangs in user code."""
        if not self._has_failed:
            atexit.register(self._end)
        self._has_failed = True

    def _end(self) -> None:
        """Wait `GRACE` for them, then kill those that hang in user code."""
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)

    def _observe(self) -> None:
        """Wait for them; if one fails, the others have `KILL_AFTER` seconds to end, and so has this one in a run."""
        while all(process.poll() in (None, 0) for process in self._processes):
            if all(process.poll() == 0 for process in self._processes):
                return
            time.sleep(1.0)
        time.sleep(KILL_AFTER)
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        if self._is_running:
            late = (
                f"rank 0 still runs {KILL_AFTER:g} s after another rank has ended with an error; ending it. {_ADVICE}"
            )
            print(late, file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)


_children = _Children()


class CheckingLauncher(_SubprocessScriptLauncher):
    """Starts the ranks of one node by running the script again.

    Args:
        cluster_environment: tells ranks and addresses.
        num_processes: on this node.
        num_nodes: of the run.
        check: called with the Trainer before any process starts; raises if the run can't work.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        check: Callable[["pl.Trainer"], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check = check

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes, which belong to this one."""
        return vars(self) | {"procs": []}

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Check and start as Lightning does, with an observer that lets failing processes say why before it kills."""
        if trainer is not None:
            self._check(trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # In a second fit of the same script the processes exist already, and run it too.
        if not self.cluster_environment.creates_processes_externally and not self.procs:
            self._call_children_scripts()
            _children.watch(self.procs)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with _children.running() if self.num_processes > 1 else nullcontext():
            return function(*args, **kwargs)

    def end(self) -> None:
        """After a failure: the other processes end with this one, unless the script catches the error and goes on."""
        _children.end_at_exit()
