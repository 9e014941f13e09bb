"""Signals that end a run: a handler only notes them, and the ranks stop together after a batch.

SIGTERM, SIGINT     once: all ranks stop after the same batch; again: all end at once
SLURM's signal      the same; then Lightning saves, and lets SLURM start the job again
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.utils.data import get_worker_info

from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.strategy.stopping.stop_together import LOOK, StopTogether
from lightning_hanayo.strategy.stopping.stopped import exit_code_of, name_of
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes

AGAIN = 1.0
"""seconds after which a signal that comes again is meant to end the run at once: torchrun and SLURM forward what a
terminal has sent to all processes already"""
_CALLED = 128
"""added to the number of a signal in the pipe, if a handler that has taken the place of ours has called ours"""
_NOW = "stop at once"
_FLOOD = 0.3
"""seconds for which a rank lives on so that all others get the message"""


class Signals:
    """The handlers of one run on one rank. They take no lock, and issue nothing.

    A main thread that waits in C++ for a message doesn't run Python's handlers. So Python writes the numbers of signals
    into a pipe (`signal.set_wakeup_fd`), and the monitor's thread reads it.

    Args:
        trainer: whose run it is.
        stop: told of the first signal.
        monitor: this rank's; None in a world of one rank.
    """

    def __init__(self, trainer: "pl.Trainer", stop: StopTogether, monitor: Monitor | None) -> None:
        self._trainer, self._stop, self._monitor = trainer, stop, monitor
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}
        self._seen: dict[int, float] = {}
        self._end_at: tuple[float, int] | None = None
        self._leave: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        """held while the pipe is read or closed; the handlers don't take it"""
        self._pipe: tuple[int, int] | None = None
        self._previous_pipe = -1
        self._is_over = False
        self.requeue: int | None = None
        """SLURM's signal, if Lightning would start the job again"""

    def listen(self, attributes: TemporaryAttributes) -> None:
        """Install the handlers, if this is the main thread, before Lightning installs its own; these call them."""
        connector = self._trainer._signal_connector
        attributes.set(connector, "_sigterm_notifier_fn", _no_op)
        attributes.set(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _no_op)
        if self._monitor is not None:
            self._leave = [self._monitor.on(_NOW, self._end_soon), self._monitor.every(LOOK, self._look)]
        if threading.current_thread() is not threading.main_thread():
            return
        environment = self._trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        slurm = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self.requeue = _free(environment.requeue_signal) if slurm else None
        for number in (signal.SIGTERM, signal.SIGINT, self.requeue):
            if number is not None and (number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN):
                self._previous[number] = signal.signal(number, self._handle)
        if self._monitor is not None:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            _pipes.add(self._pipe[1])
            self._previous_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def restore(self) -> None:
        """The run has ended. Lightning gives each signal its handler again in the Trainer's teardown, which follows."""
        self._is_over = True
        for leave in self._leave:
            leave()
        self._leave = []
        handlers = self._trainer._signal_connector._original_handlers
        for number, previous in self._previous.items():
            if number in handlers:
                handlers[number] = previous
            elif signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self._previous = {}
        with self._lock:
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                if (current := signal.set_wakeup_fd(self._previous_pipe)) != pipe[1]:
                    signal.set_wakeup_fd(current)
                _pipes.discard(pipe[1])
                for end in pipe:
                    os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if os.getpid() != self._process:
            _in_fork(number, previous)
            return
        if self._monitor is None or self._is_over:
            self._note(number)
        elif self._pipe is not None:
            self._stop.expect()
            if self._is_installed(number):
                self._write_unless_python_did(number, self._pipe[1])
            else:
                os.write(self._pipe[1], bytes([number + _CALLED]))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _is_installed(self, number: int) -> bool:
        """Whether no handler has taken this one's place since; that handler may call this one."""
        handler = signal.getsignal(number)
        return self._handle in getattr(handler, "signal_handlers", (handler,))

    @staticmethod
    def _write_unless_python_did(number: int, pipe: int) -> None:
        """User code, such as an event loop, may have set another pipe since."""
        current = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        if current != pipe:
            signal.set_wakeup_fd(current)
            os.write(pipe, bytes([number]))

    def _note(self, number: int) -> None:
        now = time.monotonic()
        first = self._seen.setdefault(number, now)
        if first == now and not self._is_over:
            self._stop.tell(number)
        elif now - first > AGAIN:
            print(
                f"hanayo: {name_of(number)} twice on rank {self._trainer.global_rank}: the run ends at once, and saves "
                f"nothing",
                file=sys.stderr,
                flush=True,
            )
            if self._monitor is None or self._is_over:
                os._exit(exit_code_of(number))
            self._monitor.tell(_NOW, number)

    # in the monitor thread

    def _look(self) -> None:
        if self._end_at is not None and time.monotonic() > self._end_at[0]:
            os._exit(exit_code_of(self._end_at[1]))
        with self._lock, suppress(OSError):  # nothing to read
            if self._pipe is not None:
                arrived = os.read(self._pipe[0], 1024)
                if self._previous_pipe != -1:
                    os.write(self._previous_pipe, bytes(number for number in arrived if number < _CALLED))
                for number in arrived:
                    if number > _CALLED or (number in self._previous and self._is_installed(number)):
                        self._note(number % _CALLED)

    def _end_soon(self, _: int, number: int) -> None:
        self._end_at = self._end_at or (time.monotonic() + _FLOOD, number)


def requeue(trainer: "pl.Trainer", number: int) -> str:
    """Let Lightning save, and rank 0 ask SLURM to start the job again. Called by all ranks, between two batches.

    Returns:
        What to tell the user.
    """
    trainer._signal_connector._slurm_sigusr_handler_fn(number, None)  # type: ignore[arg-type]
    return f"saved in {trainer.default_root_dir} for the job that SLURM starts in its place"


def mark_received(trainer: "pl.Trainer") -> None:
    """Let `trainer.received_sigterm` be true, for callbacks."""
    trainer._signal_connector.received_sigterm = True


_pipes: set[int] = set()


def _forget_pipe() -> None:
    """In a forked process: its signals aren't this rank's."""
    with suppress(ValueError):
        if (current := signal.set_wakeup_fd(-1)) not in _pipes:
            signal.set_wakeup_fd(current)


os.register_at_fork(after_in_child=_forget_pipe)


def _in_fork(number: int, previous: Any) -> None:
    """In a process that this one has forked: do what it would do without these handlers.

    A data worker goes on: SLURM and a terminal signal all processes, and its rank still needs batches.
    """
    if get_worker_info() is not None:
        return
    signal.signal(number, previous)
    os.kill(os.getpid(), number)


def _free(number: int | None) -> int | None:
    """The signal if the user has no handler for it: theirs counts."""
    number = signal.SIGUSR1 if number is None else number
    return number if signal.getsignal(number) in (signal.SIG_DFL, None) else None


def _no_op(*_: Any) -> None:
    """A function of this module, so that a patched loop can be pickled."""
