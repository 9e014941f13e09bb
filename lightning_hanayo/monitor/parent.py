"""Lets a process end when the one that has started it ends, also if that is killed.

parent   starts `command_ending_with_parent(...)` ............... killed
child    asks Linux for a signal, then becomes the command ....... killed by Linux, whatever it does

Linux sends the signal when the *thread* ends that has started the process. On other systems nothing is done.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence

PARENT = os.getppid()
"""the process that has started this one"""
_PR_SET_PDEATHSIG = 1
_CODE = (
    "import ctypes,os,sys;parent,*command=sys.argv[1:];"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG},{int(getattr(signal, 'SIGKILL', 9))});"
    "os.getppid()==int(parent) and os.execvp(command[0],command)"
)
"""imports next to nothing, so that it takes a few hundredths of a second; a killed parent leaves it in no other case"""


def command_ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command for a process that this one starts, which Linux kills when this one ends.

    Example:
        >>> subprocess.Popen(command_ending_with_parent([sys.executable, "train.py"]))
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _CODE, str(os.getpid()), *command]


def end_with_parent(parent: int | None = None) -> None:
    """Let Linux kill this process when the one that has started it ends.

    Args:
        parent: the id of that process; None: the one that has started this one with `multiprocessing`.
    """
    if sys.platform == "linux":
        _ask_for_signal(signal.SIGKILL)
        starter = multiprocessing.parent_process()
        if os.getppid() != parent if parent is not None else starter is not None and not starter.is_alive():
            os._exit(1)  # it has ended since


def outlive_parent() -> None:
    """Let this process run on when its parent ends: from now on somebody else sees to it that it ends."""
    if sys.platform == "linux":
        _ask_for_signal(0)


def heed_signals_of_parent_alone() -> None:
    """Let SIGTERM end this process if its parent sends it, and nothing else; SIGINT does nothing. Linux only.

    For a data worker: a terminal and SLURM signal all processes of a job, and the ranks need data until they stop.
    """
    if sys.platform == "linux":
        numbers = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # only then can a thread wait for them
        threading.Thread(target=_end_if_parent_says, args=(numbers, os.getppid()), daemon=True).start()


def _end_if_parent_says(numbers: Collection[int], parent: int) -> None:
    found = signal.sigwaitinfo(numbers)
    while (found.si_signo, found.si_pid) != (signal.SIGTERM, parent):
        found = signal.sigwaitinfo(numbers)
    os._exit(0)


def _ask_for_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
