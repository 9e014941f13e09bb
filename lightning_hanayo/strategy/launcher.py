"""The launcher: Lightning's own, which checks what can be known before it starts a process, and leaves none behind."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

GRACE = 5.0
"""seconds that child processes get to end by themselves after a failure"""


class CheckingLauncher(_SubprocessScriptLauncher):
    """Starts the ranks of one node by running the script again."""

    check: Callable[[], None] = staticmethod(lambda: None)

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        self.check()
        if self.procs:  # a second fit in the same script: the processes are there, and run it too
            return function(*args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def end(self) -> None:
        """After a failure: wait `GRACE` for the child processes, then kill those that hang in user code."""
        deadline = time.monotonic() + GRACE
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
