"""Runs a function as the ranks of a run, in processes of its own: for notebooks, whose code can't be run again.

notebook    launch(train, devices=2)    shows what the ranks print ...........    rank 0's result, or the first error
rank 0      fork: train()               Trainer(devices=2, strategy="hanayo")     sends its result
rank 1      fork: train()               Trainer(devices=2, strategy="hanayo")     ends

A fork has all that the notebook has defined, so nothing is pickled but results and errors. `Ranks` also runs the
trainings of `hanayo check` and the measurements of `hanayo doctor`; it can spawn processes where forks don't work.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
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
_KEPT = 2000
"""characters of each rank's output that are kept"""
_CUDA = (
    "this process has used CUDA, so its forks can't. Restart the kernel, and use no GPU before launch(), nor ask for it"
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
    with Ranks(launcher.KILL_AFTER, show=_show) as ranks:
        ranks.start(devices, lambda: move_data_to_device(function(*arguments), "cpu"))
        try:
            ranks.follow()
        except KeyboardInterrupt:  # Jupyter interrupts the ranks, too
            ranks.deadline = time.monotonic() + launcher.KILL_AFTER
            ranks.follow()
            raise
        result: _T = _result(ranks)
        return result


def _result(ranks: "Ranks") -> Any:
    """Rank 0's result. Raises the first error that isn't the consequence of another one."""
    for kind, error in (one.answer for one in ranks.answered):
        if kind == "error" and isinstance(error, HanayoError):
            raise error from None  # a mistake that its message explains
        if kind == "error" and isinstance(error, Exception):
            raise error
    codes = {one.rank: one.process.exitcode or 0 for one in ranks.all}
    ended = [(rank, code) for rank, code in codes.items() if code not in (0, _ANSWERED)]
    reasons = [f"rank {rank} {describe_end(-code if code < 0 else code << 8)}" for rank, code in ended]
    ends = {one.rank: one.answer for one in ranks.answered}
    reasons += [f"rank {rank} left the run: {value!r}" for rank, (kind, value) in ends.items() if kind == "error"]
    for reason in [*reasons, *(value for kind, value in ends.values() if kind == "consequence")]:
        raise RuntimeError(reason)
    return ends[0][1] if 0 in ends else None


@dataclass(eq=False)
class RankProcess:
    """One rank, as the process that has started it sees it."""

    rank: int
    process: BaseProcess
    answers: Connection
    output: Connection
    answer: tuple[str, Any] = ("", None)
    """a "result", the "error" that the rank has raised, or the text of a "consequence" of another rank's error"""
    printed: str = ""
    """the end of its output"""
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def read_output(self, show: Callable[[str], object]) -> bool:
        """Show what it has printed; returns whether more may come."""
        read = os.read(self.output.fileno(), 1 << 16)
        show(text := self._decoder.decode(read))
        self.printed = (self.printed + text)[-_KEPT:]
        return bool(read)


class Ranks:
    """Processes that run a function as the ranks of a run. Leaving the context kills those that still run.

    Args:
        grace: seconds that the others get to end after one has failed.
        timeout: seconds until `follow` returns, whether all have ended or not.
        show: is called with each piece of text that a rank prints.
    """

    def __init__(self, grace: float, *, timeout: float = inf, show: Callable[[str], object] = bool) -> None:
        self.all: list[RankProcess] = []
        self.answered: list[RankProcess] = []
        """those that have answered, in this order"""
        self.deadline = time.monotonic() + timeout
        self._grace = grace
        self._show = show
        self._store = serve_store()
        self._running: dict[Any, RankProcess] = {}
        """by what becomes readable when they end"""
        self._unread: dict[Any, Callable[[], bool]] = {}
        """what reads the connections on which more may come"""

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all:
            one.process.kill()
            one.process.join()

    def start(
        self, world_size: int, function: Callable[[], Any], *, method: str = "fork", failure: type | tuple[()] = ()
    ) -> None:
        """Start the processes.

        Args:
            world_size: how many.
            function: is called on each rank.
            method: "fork"; or "spawn", for which the function must be one that can be pickled.
            failure: the class of results that say why a rank has failed.
        """
        context: Any = multiprocessing.get_context(method)
        # A spawned process would share the memory of this one's tensors, were they not pickled here.
        work = function if method == "fork" else pickle.dumps(function)
        for rank in range(world_size):
            (answers, to_answer), (output, to_output) = (context.Pipe(duplex=False) for _ in range(2))
            place = rank, world_size, self._store.port
            process = context.Process(target=_main, args=(place, to_answer, to_output, work, failure))
            with warnings.catch_warnings():  # forks call nothing that needs the threads of this process
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # Python 3.12
                process.start()
            to_answer.close()
            to_output.close()
            one = RankProcess(rank, process, answers, output)
            self.all.append(one)
            self._running[process.sentinel] = one
            self._unread |= {answers: partial(self._read, one), output: partial(one.read_output, self._show)}

    def follow(self) -> None:
        """Read what the ranks print and answer, until all have ended or the deadline has come."""
        while self._running and (left := self.deadline - time.monotonic()) > 0:
            for ready in wait([*self._unread, *self._running], None if left == inf else left):
                if ready in self._running:
                    process = self._running.pop(ready).process
                    process.join()
                    if process.exitcode:
                        self.deadline = min(self.deadline, time.monotonic() + self._grace)
                elif not self._unread[ready]():
                    del self._unread[ready]
        while last := wait([*self._unread], 0):
            for ready in last:
                if not self._unread[ready]():
                    del self._unread[ready]

    def _read(self, one: RankProcess) -> bool:
        """Read a rank's answer; no more will come."""
        with suppress(EOFError, OSError):  # it has ended without one, or while it sent it
            one.answer = pickle.loads(one.answers.recv_bytes())
            self.answered.append(one)
        return False


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
    place: tuple[int, int, int], answers: Connection, output: Connection, work: Any, failure: type | tuple[()]
) -> None:
    """The main function of a rank's process."""
    begin_fork()
    if not isinstance(work, bytes):
        atexit._clear()  # the notebook's
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    faulthandler.enable()
    become_rank(*place)
    for decorator in (rank_zero_only, fabric_rank_zero_only):
        vars(decorator)["rank"] = place[0]
    code = 0
    try:
        result = pickle.loads(work)() if isinstance(work, bytes) else work()
        answer, code = _pickled("result", result), _ANSWERED * isinstance(result, failure)
    except PeerFailed as error:
        answer, code = _pickled("consequence", str(error)), _ANSWERED
    except BaseException as error:
        if torch.cuda._is_in_bad_fork():
            error.add_note(_CUDA)
        answer, code = _pickled("error", error), _ANSWERED
    answers.send_bytes(answer)
    atexit._run_exitfuncs()  # those of loggers, and of the strategy
    sys.exit(code)


def _pickled(kind: str, value: Any) -> bytes:
    """An answer: a "result", an "error" with its traceback, or the text of a "consequence" of another rank's.

    Of an error that can't be pickled only the text is sent.

    Raises:
        HanayoError: the result can't be pickled.
    """
    sent = ExceptionWithTraceback(value, value.__traceback__) if kind == "error" else value
    try:
        answer = pickle.dumps((kind, sent))
        pickle.loads(answer)  # some errors can be written, but not read
    except Exception as error:
        if kind == "error":
            return _pickled(kind, RuntimeError(f"{type(value).__name__}: {value}").with_traceback(value.__traceback__))
        advice = "Return numbers, tensors, a module, or the path of a checkpoint."
        raise HanayoError(f"the function's result can't be sent to the notebook: {error}. {advice}") from None
    return answer


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
