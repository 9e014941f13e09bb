"""Lightning's subprocess launcher, with a check before it starts a process, and without processes left behind."""

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.processes import command_ending_with_parent
from lightning_hanayo.strategy.failure import GRACE, STOPPED_TIME
from lightning_hanayo.strategy.joining import serve_store
from lightning_hanayo.strategy.stopping import INTERRUPTED

KILL_AFTER = GRACE + 3.0
"""seconds after a process has failed until those that still run are killed"""
TO_SAY_WHY = 1.0
"""seconds for the others to show an error of their own, when a process ends before all have met"""
TO_SAY_WHO = 15.0
"""seconds after the end of the script until the processes are named that it waits for"""
_PORTS = {"MASTER_PORT", "STANDALONE_PORT"}
"""variables with which Lightning is told the port where processes meet"""
_LOOK = 0.2
"""seconds between two looks at the processes"""

_IN_A_FUNCTION = "Make the Trainer in a function, and call `lightning_hanayo.notebook.launch(function, devices={})`"
_ADVICE = "A script that goes on after a failed run must catch its errors on all ranks, by `except Exception`."
_Processes = list["subprocess.Popen[bytes]"]


class _Children:
    """The processes that this one has started. They run the same script, and so all runs of all its Trainers."""

    def __init__(self) -> None:
        self._processes: _Processes = []
        self._first_rank = 1
        self._is_running = False
        self.has_failed = False
        """after a failure they don't outlive this process for long, also if they hang in user code"""
        self._wait = 0.0
        self._stopped_since: dict[int, float] = {}

    def start(self, start: Callable[[], _Processes], *, first_rank: int, wait: float) -> _Processes:
        """Start them, in a thread that outlives them: Linux ends them together with the thread that starts them.

        Args:
            start: starts and returns them.
            first_rank: the global rank of the first one; the others follow.
            wait: seconds that they may run on once this process has ended its script.
        """
        self._first_rank, self._wait = first_rank, wait
        started: Future[_Processes] = Future()
        threading.Thread(target=self._observe, args=(start, started), daemon=True, name="hanayo-children").start()
        self._processes = started.result()
        atexit.register(self._end)
        return self._processes

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

    def _end(self) -> None:
        """At the end of the script: wait for them, then kill those that still run. The first one's failure counts."""
        start, over = time.monotonic(), "rank 0 has ended its script"
        if not self.has_failed:
            late = self._late(start + min(self._wait, TO_SAY_WHO))
            stopped = [rank for rank in late if _is_stopped(self._ranks[rank])]
            for rank in stopped:
                when = f"{TO_SAY_WHO:g} s after {over}"
                print(f"rank {rank} is stopped (SIGSTOP or SIGTSTP) {when}; ending it", file=sys.stderr)
                self._ranks[rank].kill()
            if running := [rank for rank in late if rank not in stopped]:
                print(f"{over}, and waits up to {self._wait:g} s for ranks {running}", file=sys.stderr)
            if late := self._late(start + self._wait):
                print(f"ranks {late} still run {self._wait:g} s after {over}; ending them", file=sys.stderr)
            for rank, process in self._ranks.items():
                if (process.poll() or 0) < 0 and rank not in stopped:
                    print(f"rank {rank} {_end_of(process)} after rank 0 had left the run", file=sys.stderr)
        self._late(start + GRACE)  # of a failure, which was shown; a process that ends with a code says why
        self._kill()
        codes = [process.wait() for process in self._processes]
        if any(codes) and not self.has_failed:
            sys.stdout.flush()
            os._exit(max(1, *codes))

    def _late(self, deadline: float) -> list[int]:
        """The ranks that have not ended by then."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [rank for rank, process in self._ranks.items() if process.poll() is None]

    def _observe(self, start: Callable[[], _Processes], started: "Future[_Processes]") -> None:
        """Start them, and watch them until all have met: if one can't come, all end. Later their monitors see to it."""
        try:
            children = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(children)
        while True:
            lost = self._lost_rank() if self._is_running and not dist.is_initialized() else None
            if lost is not None:
                time.sleep(TO_SAY_WHY)
                if self._is_running:  # it has not failed meanwhile, and left the others
                    self._kill()
                    print(f"{lost} before it joined the others; ending them", file=sys.stderr)
                    os._exit(1)
            if all(process.poll() is not None for process in children):
                return
            time.sleep(_LOOK)

    def _lost_rank(self) -> str | None:
        """A rank that can't join the others, and why: it has ended, by `sys.exit(0)` too, or was stopped for long."""
        now = time.monotonic()
        stopped = [rank for rank, process in self._ranks.items() if _is_stopped(process)]
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        for rank, process in self._ranks.items():
            if process.poll() is not None:
                return f"rank {rank} {_end_of(process)}"
        late = [rank for rank, since in self._stopped_since.items() if now - since > STOPPED_TIME]
        return f"rank {late[0]} was stopped (SIGSTOP or SIGTSTP) {STOPPED_TIME:g} s ago" if late else None

    @property
    def _ranks(self) -> dict[int, "subprocess.Popen[bytes]"]:
        return dict(enumerate(self._processes, start=self._first_rank))

    def _kill(self) -> None:
        """End those that still run."""
        for process in self._processes:
            process.kill()


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is None and processes.state(process.pid) in processes.STOPPED


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    """How it has ended, to be put after its name."""
    code = process.returncode
    return processes.describe_end(-code) if code < 0 else f"ended with exit code {code}"


_children = _Children()


class CheckingLauncher(_SubprocessScriptLauncher):
    """Starts the ranks of one node by running the script again.

    Args:
        strategy: a `MeshParallelStrategy`, which checks runs before any process starts, and hears of their ends. Its
            `timeout` is how long processes may run on once this one has ended its script.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self.served: TCPStore | None = None
        """where the processes meet; served from before they start until this one ends"""
        self.arguments: dict[str, Any] = {}
        """of the run, as the user gave them to `fit`, `test`, ..."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes, which belong to this one."""
        return vars(self) | {"procs": [], "served": None, "arguments": {}}

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether it starts no process. Lightning asks in notebooks alone.

        Raises:
            HanayoError: it would; Lightning's error advises a strategy that can't train the model.
        """
        if self.num_processes * self.num_nodes > 1 and not self.cluster_environment.creates_processes_externally:
            advice = _IN_A_FUNCTION.format(self.num_processes)
            raise HanayoError(f"the other ranks can't run a notebook's or interactive session's code again. {advice}")
        return True

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        """Check and start as Lightning does, with an observer that lets failing processes say why before it kills."""
        # In a second fit of the same script the processes exist already, and run it too.
        starts = not self.cluster_environment.creates_processes_externally and not self.procs
        if trainer is not None:
            self.arguments = dict(signature(function).bind(*args, **kwargs).arguments)
            self._strategy.check_before_launch(trainer, self.arguments.get("ckpt_path") if starts else None)
        try:
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        except ValueError as error:
            raise HanayoError(str(error)) from None
        if starts:
            if self.num_processes > 1 and sys.argv[0] in ("", "-"):
                advice = f"Save it as a file. Or: {_IN_A_FUNCTION.format(self.num_processes)}"
                raise HanayoError(f"the other ranks can't read this program again from standard input. {advice}")
            self._call_children_scripts()
        elif isinstance(self.cluster_environment, LightningEnvironment) and self.num_processes * self.num_nodes > 1:
            # the environment's number is that of `notebook.launch`, or of an earlier Trainer
            started, wanted = os.environ.get("WORLD_SIZE"), self.num_processes * self.num_nodes
            if started is not None and int(started) != wanted:
                raise HanayoError(
                    f"{started} processes were started, but the Trainer's devices x num_nodes is {wanted}"
                )
        _set_num_threads_if_needed(num_processes=self.num_processes)
        with _children.running() if self.num_processes > 1 else nullcontext():
            result = function(*args, **kwargs)
            self._strategy.after_launch()
            return result

    @override
    def _call_children_scripts(self) -> None:
        """Start them as Lightning does, except that Linux ends them with this process, whatever they do by then."""
        self._check_can_spawn_children()
        environment = self.cluster_environment
        if self.num_nodes == 1 and isinstance(environment, LightningEnvironment) and not _PORTS & os.environ.keys():
            self.served = serve_store()
            os.environ["MASTER_PORT"] = str(self.served.port)
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        self.procs = _children.start(
            lambda: [_start_script(local_rank) for local_rank in range(1, self.num_processes)],
            first_rank=environment.node_rank() * self.num_processes + 1,
            wait=self._strategy.options.transfer_time.total_seconds(),
        )

    @override
    def kill(self, signum: Any) -> None:
        """Called by Lightning's handler of KeyboardInterrupt, as the last thing before it exits with 1.

        All processes end by themselves: each has been interrupted, too, and may still be saving.

        Raises:
            SystemExit: always, with the code of an interrupted program.
        """
        raise SystemExit(INTERRUPTED)

    def end(self) -> None:
        """After a failure: the other processes end with this one, unless the script catches the error and goes on."""
        _children.has_failed = True


def _start_script(local_rank: int) -> "subprocess.Popen[bytes]":
    """Run this process's script again, as another rank."""
    folder = None
    if _HYDRA_AVAILABLE and import_module("hydra.core.hydra_config").HydraConfig.initialized():
        command, folder = _hydra_subprocess_cmd(local_rank)
    else:
        command = [sys.executable, *sys.orig_argv[1:]] if sys.argv[0] == "-c" else _basic_subprocess_cmd()
    environment = os.environ | {"LOCAL_RANK": str(local_rank)}
    return subprocess.Popen(command_ending_with_parent(command), env=environment, cwd=folder)
