"""What this rank does, for others who ask: read from its stack, its counters and the Trainer's state."""

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from lightning_hanayo.monitor.hangs.waits import Status
from lightning_hanayo.runtime.comm.transport import Transport
from lightning_hanayo.schedule import Action
from lightning_hanayo.strategy.hangs.stack import doing, read_stack, runs_trainer
from lightning_hanayo.strategy.hangs.waits_in_stack import find_wait, operations_done


@dataclass
class OwnStatus:
    """Reads what a rank does, in any thread. Made in the thread that runs the Trainer.

    Args:
        rank: of this process.
        progress: returns a number that grows with all that the rank does.
        action: returns the action of the schedule that runs; None between batches.
        at: returns the step and the phase, as "step 12 (training)".
        transports: returns those of the run.
    """

    rank: int
    progress: Callable[[], int]
    action: Callable[[], Action | None]
    at: Callable[[], str]
    transports: Callable[[], Iterable[Transport]]
    _thread: int = field(default_factory=threading.get_ident, init=False)

    def is_in_run(self) -> bool:
        """Whether the thread runs a Trainer's function."""
        return runs_trainer(self._thread)

    def read(self, still: float, channels: Collection[str] = ()) -> Status:
        """The status of this rank, which hasn't moved for so many seconds, and what it has done on the channels.

        It holds no tensor and no process group.
        """
        progress, stack = self.progress(), read_stack(self._thread)
        wait = find_wait(self.rank, stack)
        text, source = doing(stack.frames, self.action())
        done = operations_done(self.rank, self.transports()) if channels else {}
        done = {channel: number for channel, number in done.items() if channel in channels}
        return Status(self.rank, progress, still, self.at(), wait, text, source, done)
