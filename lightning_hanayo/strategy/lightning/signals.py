"""Signals: SIGTERM, SIGINT and SLURM's are noted by a handler, and all ranks stop together after a batch.

SIGTERM, SIGINT     once: all ranks stop after the same batch; again: the run fails, and all end within seconds
SLURM's signal      the same; then Lightning saves, and lets SLURM start the job again

A run is stopped before a batch of training or evaluation, or where an evaluation ends:

fit_loop     epoch_loop.advance                 before the batch is read
val_loop     _evaluation_step                   after it is read: a validation that is stopped is run anew
             _store_dataloader_outputs          data ranks may have different numbers of batches
predict_loop _predict_step, on_run_end

From the handler to the end of the run, on one rank:

handler          ->  all ranks agree on a batch  ->  stop point after it  ->  save  ->  the error that ends the run
here                 strategy/stopping.py                here                 strategy/stopping.py
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import get_worker_info

from lightning_hanayo.pipeline_parallel.rng import generator_states, set_generators
from lightning_hanayo.strategy import stopping
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.loops import generators_of_loaders
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run

AGAIN = 1.0
"""seconds after which a signal that comes again is meant to end the run at once: torchrun and SLURM forward what a
terminal has sent to all processes already"""
_CALLED = 128
"""added to the number of a signal in the pipe, if a handler that has taken the place of ours has called ours"""


class Signals:
    """The handlers of one run on one rank. They take no lock, and issue nothing.

    A main thread that waits in C++ for a message doesn't run Python's handlers. So Python writes the numbers of signals
    into a pipe (`signal.set_wakeup_fd`), and the monitor's thread reads it.

    They are installed if this is the main thread, before Lightning installs its own; these call them.

    Args:
        run: whose handlers they are. Its failures are told if a signal comes again.
        stop: told of the first signal.
    """

    def __init__(self, run: Run, stop: stopping.StopTogether) -> None:
        self._trainer, self._stop, self._failures = run.trainer, stop, run.failures
        self._monitor = run.failures.monitor if run.failures.monitor.num_ranks > 1 else None
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}
        self._seen: dict[int, float] = {}
        self._lock = threading.Lock()
        """held while the pipe is read or closed; the handlers don't take it"""
        self._pipe: tuple[int, int] | None = None
        self._previous_pipe = -1
        self._is_over = False
        self.requeue: int | None = None
        """SLURM's signal, if Lightning would start the job again"""
        run.attributes.set(self._trainer._signal_connector, "_sigterm_notifier_fn", _no_op)
        run.attributes.set(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _no_op)
        self._leave = run.failures.monitor.every(stopping.LOOK, self._look)  # nothing in a world of one rank
        if threading.current_thread() is not threading.main_thread():
            return
        environment = self._trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            slurms = signal.SIGUSR1 if environment.requeue_signal is None else environment.requeue_signal
            if signal.getsignal(slurms) in (signal.SIG_DFL, None):  # else the user's handler counts
                self.requeue = slurms
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
        self._leave()
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
        if os.getpid() != self._process:  # this one was forked: do what it would do without these handlers
            # A data worker goes on: SLURM and a terminal signal all processes, and its rank still needs batches.
            if get_worker_info() is None:
                signal.signal(number, previous)
                os.kill(os.getpid(), number)
            return
        if self._monitor is None or self._is_over:
            self._note(number)
        elif self._pipe is not None:
            self._stop.expect()
            pipe = self._pipe[1]
            if not self._is_installed(number):
                os.write(pipe, bytes([number + _CALLED]))
            elif (current := signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)) != pipe:
                signal.set_wakeup_fd(current)  # of user code, such as an event loop: Python has not written to ours
                os.write(pipe, bytes([number]))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _is_installed(self, number: int) -> bool:
        """Whether no handler has taken this one's place since; that handler may call this one."""
        handler = signal.getsignal(number)
        return self._handle in getattr(handler, "signal_handlers", (handler,))

    def _note(self, number: int) -> None:
        now = time.monotonic()
        first = self._seen.setdefault(number, now)
        if first == now and not self._is_over:
            self._stop.tell(number)
        elif now - first > AGAIN:
            code, what = stopping.exit_code_of(number), f"got {stopping.name_of(number)} twice, so nothing is saved"
            if self._monitor is None or self._is_over:
                print(f"hanayo: rank {self._failures.rank} {what}", file=sys.stderr, flush=True)
                os._exit(code)
            self._failures.fail_for(self._failures.rank, what, code=code)

    # in the monitor thread

    def _look(self) -> None:
        with self._lock, suppress(OSError):  # nothing to read
            if self._pipe is not None:
                arrived = os.read(self._pipe[0], 1024)
                if self._previous_pipe != -1:
                    os.write(self._previous_pipe, bytes(number for number in arrived if number < _CALLED))
                for number in arrived:
                    if number > _CALLED or (number in self._previous and self._is_installed(number)):
                        self._note(number % _CALLED)


_pipes: set[int] = set()


def _forget_pipe() -> None:
    """In a forked process: its signals aren't this rank's."""
    with suppress(ValueError):
        if (current := signal.set_wakeup_fd(-1)) not in _pipes:
            signal.set_wakeup_fd(current)


os.register_at_fork(after_in_child=_forget_pipe)


def _no_op(*_: Any) -> None:
    """A function of this module, so that a patched loop can be pickled."""


_MANY = 1 << 32
"""more batches than one evaluation has"""


class StopsOnSignal:
    """One rank's part in stopping a run by a signal: asks before each batch whether it goes on. Made by all ranks.

    Args:
        run: may be stopped.
        finish: waits until a checkpoint is there.
    """

    def __init__(self, run: Run, finish: Callable[[], object]) -> None:
        self._trainer, self._failures, self._device, self._finish = run.trainer, run.failures, run.device, finish
        self._is_evaluating = False
        self._random_before: dict[str, Tensor] = {}
        self._loaders_before: list[tuple[torch.Generator, Tensor]] = []
        self._weights_before: list[Tensor] = []
        self._is_epoch_start = False
        self._goes_on: bool | None = None
        self._stop = stopping.StopTogether(run.failures)
        self._signals = Signals(run, self._stop)
        self._add_to_loops(run.attributes)

    def close(self) -> None:
        """The run has ended on this rank."""
        self._signals.restore()
        self._stop.close()

    def _add_to_loops(self, attributes: TemporaryAttributes) -> None:
        trainer: Any = self._trainer
        training = trainer.fit_loop.epoch_loop
        attributes.before(training, "run", self._begin_epoch)
        attributes.before(training, "advance", self._train)
        attributes.before(training.val_loop, "run", self._begin_validation)
        for loop in (training.val_loop, trainer.validate_loop, trainer.test_loop):
            attributes.before(loop, "_evaluation_step", self._evaluate)
            attributes.before(loop, "_store_dataloader_outputs", self._end_loader)
        attributes.before(trainer.predict_loop, "_predict_step", self._evaluate)
        attributes.before(trainer.predict_loop, "on_run_end", self._end_loader)

    @contextmanager
    def _as_after_batch(self) -> Iterator[None]:
        """Inside it, loops and generators are as a run must find them that goes on after the last training batch.

        A validation that was stopped has begun its first batch there, and not ended it: Lightning runs it anew. An
        epoch of which no batch was trained begins anew, too: its loader draws the order of samples again.
        """
        if self._is_epoch_start or self._is_evaluating:
            self._rewind_random()
        if not self._is_evaluating:
            yield
            return
        validated: Any = self._trainer.fit_loop.epoch_loop.val_loop.batch_progress
        before = validated.state_dict()
        for progress, completed in ((validated.current, 0), (validated.total, validated.total.completed)):
            progress.ready = progress.started = completed + 1
            progress.processed = progress.completed = completed
        try:
            yield
        finally:
            validated.load_state_dict(before)

    def _begin_epoch(self) -> None:
        self._remember_random()
        self._is_epoch_start = True

    def _train(self) -> None:
        self._begin((self._failures.position[0] + 1, 0))
        self._is_epoch_start = False

    def _remember_random(self) -> None:
        of_loaders = generators_of_loaders(self._trainer)
        self._random_before = generator_states(self._device)
        self._loaders_before = [(one, one.get_state()) for one in of_loaders.values()]

    def _rewind_random(self) -> None:
        set_generators(self._random_before, self._device)
        for generator, state in self._loaders_before:
            generator.set_state(state)

    def _begin_validation(self) -> None:
        self._remember_random()
        self._weights_before = self._weights()

    def _evaluate(self) -> None:
        trained, evaluated, *_ = self._failures.position
        self._begin((trained, evaluated + 1))

    def _end_loader(self) -> None:
        trained, evaluated, *_ = self._failures.position
        self._begin((trained, (evaluated // _MANY + 1) * _MANY))

    def _begin(self, place: stopping.Place) -> None:
        decision = self._stop.begin(place)
        self._is_evaluating = place[1] > 0
        if decision is not None:
            if not self._must_end_validation(decision):
                self._end(decision)
            self._stop.go_on(place)

    def _must_end_validation(self, decision: stopping.Decision) -> bool:
        """Whether hooks have put other weights, such as an average, in place for a validation of `fit`.

        A checkpoint would have them as the trained ones. The hooks at the end of the validation put these back.
        """
        can_save = self._trainer.state.fn == TrainerFn.FITTING and self._failures.position[0] > 0
        if not self._is_evaluating or not can_save or decision.last is None:
            return False
        if self._goes_on is None:  # all ranks stop here for the first time
            current = self._weights()
            same = [torch.equal(*pair) for pair in zip(self._weights_before, current, strict=False)]
            changed = len(self._weights_before) != len(current) or not all(same)
            self._goes_on = any(on_all_ranks(lambda: changed))
        return self._goes_on

    def _weights(self) -> list[Tensor]:
        """A figure for each parameter of this rank, which stays on its device."""
        with self._trainer.strategy._unguarded():  # type: ignore[attr-defined]
            own = [one for one in self._trainer.lightning_module.parameters() if not one.is_meta]
            return [torch.linalg.vector_norm(one.detach()) for one in own if one.is_floating_point()]

    def _end(self, decision: stopping.Decision) -> None:
        trainer = self._trainer
        while decision.last is None:  # the failure ends this run, too
            self._failures.check_peers()
            time.sleep(stopping.LOOK)
        if decision.signal != signal.SIGINT:
            trainer._signal_connector.received_sigterm = True  # callbacks read `trainer.received_sigterm`
        with self._as_after_batch():
            if decision.signal == self._signals.requeue:  # Lightning saves, and rank 0 asks SLURM to start anew
                trainer._signal_connector._slurm_sigusr_handler_fn(decision.signal, None)  # type: ignore[arg-type]
                saved = f"saved in {trainer.default_root_dir} for the job that SLURM starts in its place"
            else:
                saved = stopping.save(trainer, self._finish, has_trained=self._failures.position[0] > 0)
        when = f"after step {trainer.global_step}" if trainer.state.fn == TrainerFn.FITTING else "between two batches"
        by, is_interrupt = self._failures.name(decision.rank), decision.signal == signal.SIGINT
        error = stopping.Interrupted if is_interrupt else stopping.StoppedBySignal
        raise error(f"stopped by {stopping.name_of(decision.signal)} on {by} {when}; {saved}")
