"""The launcher: Lightning's own, which checks what can be known before it starts a process, and leaves none behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_hanayo.strategy.failure import GRACE

LAST = GRACE + 3.0
"""seconds after a process has failed until whatever still runs is killed"""


class CheckingLauncher(_SubprocessScriptLauncher):
    """Starts the ranks of one node by running the script again."""

    check: Callable[["pl.Trainer | None"], None] = staticmethod(lambda trainer: None)

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes, which are this one's."""
        return vars(self) | {"procs": []}

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """As Lightning's, but for the check, and for its observer, which kills all the moment it finds one failed."""
        self.check(trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # In a second fit of the same script the processes are there, and run it too.
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
    """Wait for the child processes; if one fails, the others and this one get `LAST` seconds to end by themselves."""
    while all(process.poll() in (None, 0) for process in processes):
        if all(process.poll() == 0 for process in processes):
            return
        time.sleep(1.0)
    time.sleep(LAST)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
