"""A run that a signal stops: from its handler to the checkpoint, on one rank.

handler          ->  all ranks agree on a batch  ->  stop point after it  ->  save  ->  the error that ends the run
signals.py           stop_together.py                stop_points.py           end_run.py
"""

import signal
import sys
import time
from collections.abc import Callable

import lightning.pytorch as pl
import torch

from lightning_hanayo.strategy.failure import Failures
from lightning_hanayo.strategy.lightning import signals
from lightning_hanayo.strategy.lightning.loops.stop_points import StopPoints
from lightning_hanayo.strategy.stopping.end_run import no_agreement, report_of, save, what_stopped
from lightning_hanayo.strategy.stopping.stop_together import LOOK, Decision, StopTogether
from lightning_hanayo.strategy.stopping.stopped import exit_code_of, stopped
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from lightning_hanayo.topology import Topology


class StopsOnSignal:
    """One rank's side of it, for one run. Made by all ranks.

    Args:
        trainer: whose run may be stopped.
        failures: this rank's; have the monitor.
        topology: of the ranks.
        device: this rank's.
        attributes: restored at the end of the run.
        finish: waits until a checkpoint is there.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        failures: Failures,
        topology: Topology,
        device: torch.device,
        attributes: TemporaryAttributes,
        *,
        finish: Callable[[], object],
    ) -> None:
        self._topology, self._failures, self._finish = topology, failures, finish
        monitor = failures.monitor if topology.world_size > 1 else None
        self._stop = StopTogether(
            failures.rank,
            topology.world_size,
            failures.run,
            monitor,
            check_peers=failures.check_peers,
            on_no_agreement=self._fail,
        )
        self._signals = signals.Signals(trainer, self._stop, monitor)
        self._signals.listen(attributes)
        StopPoints(trainer, self._stop, device, self._end).add(attributes)

    def close(self) -> None:
        """The run has ended on this rank."""
        self._signals.restore()
        self._stop.close()

    def say(self, exception: BaseException) -> None:
        """Say once what has stopped the run, if a signal has. Called by all ranks, after callbacks."""
        report = report_of(exception)
        if report and self._failures.rank == 0:
            print(f"hanayo: {report}", file=sys.stderr, flush=True)

    def _end(self, points: StopPoints, decision: Decision) -> None:
        trainer = points.trainer
        while decision.last is None:  # the failure ends this run, too
            self._failures.check_peers()
            time.sleep(LOOK)
        if decision.signal != signal.SIGINT:
            signals.mark_received(trainer)
        with points.as_after_batch():
            if decision.signal == self._signals.requeue:
                saved = signals.requeue(trainer, decision.signal)
            else:
                saved = save(trainer, self._finish, has_trained=points.num_trained > 0)
        raise stopped(decision.signal, f"{what_stopped(trainer, decision, self._name(decision.rank))}; {saved}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._topology.place(rank)})"

    def _fail(self, decision: Decision) -> None:
        """End all ranks, because some can't be reached. Called in the monitor thread of each of them."""
        what = no_agreement(decision, self._name)
        self._failures.fail_for(decision.missing[0], what, code=exit_code_of(decision.signal))
