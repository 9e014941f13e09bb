"""Lightning's subprocess launcher, with a check before it starts a process, and without processes left behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_hanayo.strategy.failure import GRACE

KILL_AFTER = GRACE + 3.0
"""seconds after a process has failed until those that still run are killed"""


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
            threading.Thread(target=_observe, args=(self.procs,), daemon=True, name="hanayo-children").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def end(self) -> None:
        """After a failure: wait `GRACE` for the child processes, then kill those that hang in user code."""
        deadline = time.monotonic() + GRACE
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)


def _observe(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait for the child processes; if one fails, the others and this one have `KILL_AFTER` seconds to end."""
    while all(process.poll() in (None, 0) for process in processes):
        if all(process.poll() == 0 for process in processes):
            return
        time.sleep(1.0)
    time.sleep(KILL_AFTER)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
