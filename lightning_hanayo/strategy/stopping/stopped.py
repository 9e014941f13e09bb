"""The errors with which a run ends that a signal has stopped, and exit codes.

SIGTERM    StoppedBySignal, Lightning's SIGTERMException     75, EX_TEMPFAIL: run it again
SIGINT     Interrupted, a KeyboardInterrupt                 130, as shells say it
"""

import signal

from lightning.pytorch.utilities.exceptions import SIGTERMException

REQUEUE, INTERRUPTED = 75, 130


class StoppedBySignal(SIGTERMException):
    """The run was stopped by a signal. All ranks raise it after the same batch; it ends a script with code 75."""

    def __init__(self, report: str) -> None:
        super().__init__(REQUEUE)
        self.report = report
        """what was stopped, where, and what was saved"""


class Interrupted(KeyboardInterrupt):
    """The user has interrupted the run. All ranks raise it after the same batch."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report
        """what was stopped, where, and what was saved"""


def stopped(number: int, report: str) -> StoppedBySignal | Interrupted:
    """The error for a signal."""
    return Interrupted(report) if number == signal.SIGINT else StoppedBySignal(report)


def exit_code_of(number: int) -> int:
    """The exit code of a run that the signal ends."""
    return INTERRUPTED if number == signal.SIGINT else REQUEUE


def name_of(number: int) -> str:
    """The name of a signal.

    Example:
        >>> name_of(15), name_of(99)
        ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
