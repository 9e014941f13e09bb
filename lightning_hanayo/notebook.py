"""Runs a function as the ranks of a run, in forks of this process: for notebooks, whose code can't be run again.

notebook    launch(train, devices=2)    shows what the ranks print ...........    rank 0's result, or the first error
rank 0      fork: train()               Trainer(devices=2, strategy="hanayo")     sends its result
rank 1      fork: train()               Trainer(devices=2, strategy="hanayo")     ends

A fork has all that the notebook has defined, so nothing is pickled but results and errors.
"""

import atexit
import codecs
import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities import rank_zero_only

from lightning_hanayo.errors import HanayoError, PeerFailed
from lightning_hanayo.monitor.processes import begin_fork, describe_end
from lightning_hanayo.strategy.failure import leave_at_exit
from lightning_hanayo.strategy.joining import serve_store
from lightning_hanayo.strategy.lightning import launcher

_ANSWERED = 67
"""the exit code of a rank whose answer says why it has failed"""
_CUDA = (
    "this process has used CUDA, which its forks then can't. Restart the kernel, and let nothing use the GPUs before "
    "launch() does: no tensor on a GPU, and no torch.cuda.is_available()"
)
_T = TypeVar("_T")


def launch(function: Callable[..., _T], *arguments: Any, devices: int) -> _T:
    """Run `function(*arguments)` on the ranks of this machine. Called in a notebook, or in any interactive session.

    The function makes the Trainer, with the same number of devices. It may be defined in the notebook, and use all
    that is defined there; it works on copies, so the notebook's own objects stay as they are. On CPUs each rank
    computes with one thread. What the ranks print is shown here.

    Example:
        >>> def train():
        ...     trainer = L.Trainer(accelerator="cpu", devices=2, strategy="hanayo", max_epochs=1)
        ...     trainer.fit(Classifier(), make_loader())
        ...     return trainer.strategy.gather_model()
        >>> model = launch(train, devices=2)

    Args:
        function: called on each rank.
        arguments: of the function.
        devices: the number of ranks.

    Returns:
        The function's result on rank 0, with its tensors on the CPU.

    Raises:
        HanayoError: forks can't work here, as this process has used CUDA; or rank 0's result can't be sent.
        RuntimeError: a rank was killed, or has left by `sys.exit`.
        Exception: the error of the rank that has failed first, with that rank's traceback as its cause.
    """
    if devices < 1:
        raise HanayoError(f"devices={devices}: launch() needs at least one rank")
    if "fork" not in multiprocessing.get_all_start_methods():
        raise HanayoError("launch() forks this process, which this system can't: run the training as a script")
    if torch.cuda.is_initialized():
        raise HanayoError(_CUDA)
    leave_at_exit()  # the process group of a run in this process, which forks would take for theirs
    store = serve_store()
    output, to_output = os.pipe()
    ranks = _Ranks(output)
    try:
        for rank in range(devices):
            ranks.start(rank, devices, store.port, to_output, function, arguments)
        os.close(to_output)
        ranks.follow()
    except KeyboardInterrupt:  # Jupyter interrupts the ranks, too
        ranks.deadline = time.monotonic() + launcher.KILL_AFTER
        ranks.follow()
        raise
    finally:
        ranks.kill()
    result: _T = ranks.result()
    return result


@dataclass
class _Ranks:
    """The processes, as the notebook sees them. `output` is the end of a pipe that has all that they print."""

    output: int
    deadline: float = inf
    _running: dict[int, BaseProcess] = field(default_factory=dict)
    """by what becomes readable when they end"""
    _ranks: dict[Connection, int] = field(default_factory=dict)
    """of those that haven't answered, by the connection that they answer on"""
    _exit_codes: dict[str, int | None] = field(default_factory=dict)
    _result: Any = None
    _errors: list[Exception] = field(default_factory=list)
    """in the order in which they came"""
    _left: list[str] = field(default_factory=list)
    """why ranks have ended without an error of their own"""

    def start(self, rank: int, world_size: int, port: int, *work: Any) -> None:
        """Fork a rank."""
        context = multiprocessing.get_context("fork")
        answer, to_answer = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(rank, world_size, port, to_answer, *work), name=f"rank {rank}")
        start_forks([process])
        to_answer.close()
        self._running[process.sentinel] = process
        self._ranks[answer] = rank

    def follow(self) -> None:
        """Show what the ranks print, and read their answers, until all have ended or the deadline has come."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        outputs = [self.output]
        while self._running and (left := self.deadline - time.monotonic()) > 0:
            for ready in wait([*outputs, *self._ranks, *self._running], None if left == inf else left):
                if isinstance(ready, Connection):
                    self._read(ready)
                elif ready in self._running:
                    self._end(self._running.pop(ready))
                elif text := os.read(self.output, 1 << 16):
                    _show(decoder.decode(text))
                else:
                    outputs.clear()
        for answer in [answer for answer in self._ranks if answer.poll()]:
            self._read(answer)
        os.set_blocking(self.output, False)
        with suppress(BlockingIOError):
            while text := os.read(self.output, 1 << 16):
                _show(decoder.decode(text))

    def _read(self, answer: Connection) -> None:
        rank = self._ranks.pop(answer)
        with suppress(EOFError):  # it has ended without an answer
            kind, value = pickle.loads(answer.recv_bytes())
            if kind == "consequence":
                self._left.append(value)
            elif kind == "error" and isinstance(value, Exception):
                self._errors.append(value)
            elif kind == "error":
                self._left.insert(0, f"rank {rank} left the run: {value!r}")
            elif rank == 0:
                self._result = value

    def _end(self, process: BaseProcess) -> None:
        process.join()
        self._exit_codes[process.name] = process.exitcode
        if process.exitcode:
            self.deadline = min(self.deadline, time.monotonic() + launcher.KILL_AFTER)

    def kill(self) -> None:
        """Kill those that still run."""
        for process in self._running.values():
            process.kill()
            process.join()
        os.close(self.output)

    def result(self) -> Any:
        """Rank 0's result. Raises the first error that isn't the consequence of another one."""
        for error in self._errors:
            if isinstance(error, HanayoError):
                raise error from None  # a mistake that its message explains
            raise error
        ends = [
            f"{name} {describe_end(-code if code < 0 else code << 8)}"
            for name, code in self._exit_codes.items()
            if code is not None and code not in (0, _ANSWERED)
        ]
        for reason in [*ends, *self._left]:
            raise RuntimeError(reason)
        return self._result


def start_forks(processes: Iterable[BaseProcess]) -> None:
    """Start processes without Python's warning of threads: forks call nothing that needs those of this process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # Python 3.12
        for process in processes:
            process.start()


def become_rank(rank: int, world_size: int, port: int) -> None:
    """Set what Lightning and the strategy read to find a rank's place, in a process that was started as one."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is the parent's
    os.environ["SLURM_JOB_NAME"] = "interactive"  # or Lightning takes a notebook's job for one with a task per rank
    # A fork has lost the threads of its parent's OpenMP, and would wait for them. Lightning reads the variable.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _main(
    rank: int,
    world_size: int,
    port: int,
    answer: Connection,
    output: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a rank's process."""
    begin_fork()
    atexit._clear()  # the notebook's
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    faulthandler.enable()
    become_rank(rank, world_size, port)
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        vars(decorator)["rank"] = rank
    code = 0
    try:
        answered = _pickled("result", move_data_to_device(function(*arguments), "cpu"))
    except PeerFailed as error:
        answered, code = _pickled("consequence", str(error)), _ANSWERED
    except BaseException as error:
        if torch.cuda._is_in_bad_fork():
            error.add_note(_CUDA)
        answered, code = _pickled_error(error), _ANSWERED
    answer.send_bytes(answered)
    atexit._run_exitfuncs()  # those of loggers, and of the strategy
    sys.exit(code)


def _pickled(kind: str, value: Any) -> bytes:
    """An answer: a "result", an "error", or the text of a "consequence" of another rank's.

    Raises:
        HanayoError: the value can't be pickled.
    """
    try:
        answer = pickle.dumps((kind, value))
        pickle.loads(answer)  # some errors can be written, but not read
    except Exception as error:
        advice = "Return numbers, tensors, a module, or the path of a checkpoint."
        raise HanayoError(f"the function's result can't be sent to the notebook: {error}. {advice}") from None
    return answer


def _pickled_error(error: BaseException) -> bytes:
    """With its traceback; only the text of one that can't be pickled."""
    try:
        return _pickled("error", ExceptionWithTraceback(error, error.__traceback__))
    except HanayoError:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        return _pickled("error", ExceptionWithTraceback(plain, error.__traceback__))


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
