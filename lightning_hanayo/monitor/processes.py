"""Looks at other processes of this host: when they started, whether they run, and how they ended.

process     /proc/<pid>/stat          pidfd, opened before
running     state R, S, D             not readable
stopped     state T or t              not readable
ended       state Z, exit status      readable
collected   no file                   readable; exit status on Linux 6.15 and later

It also lets a process end when the one that has started it ends, even if that is killed:

parent   starts `command_ending_with_parent(...)` ............... killed
child    asks Linux for a signal, then becomes the command ....... killed by Linux, whatever it does

Linux sends the signal when the *thread* ends that has started the process. On other systems nothing is done.
"""

import ctypes
import fcntl
import gc
import multiprocessing
import os
import signal
import struct
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOPPED, ENDED = ("T", "t"), ("Z", "X", "")
_STATE, _STARTED, _EXIT_STATUS = 3, 22, 52
"""fields of /proc/<pid>/stat, counted from 1 as in its manual page"""
_EXIT_KNOWN = 1 << 3
"""PIDFD_INFO_EXIT of linux/pidfd.h"""
_INFO_SIZE, _STATUS_OFFSET = 64, 60
"""of its struct pidfd_info, in the first version, which later kernels take, too"""
_GET_INFO = (3 << 30) | (_INFO_SIZE << 16) | (0xFF << 8) | 11
"""PIDFD_GET_INFO"""


def host() -> str:
    """The same for processes that see each other in /proc: the running kernel and the namespace of pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"process {os.getpid()} of {os.uname().nodename}"


def state(pid: int) -> str:
    """The letter of a process's state, as `ps` shows it; "" if there is no such process."""
    return _field(pid, _STATE)


def started(pid: int) -> int:
    """When a process started, in clock ticks since the host did; 0 if there is no such process."""
    return int(_field(pid, _STARTED) or 0)


def open_pidfd(pid: int) -> int | None:
    """A file that becomes readable when the process ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """How an ended process ended, as `os.wait` gives it; None if the system doesn't say."""
    if state(pid) == "Z" and (status := _field(pid, _EXIT_STATUS)):  # its parent may collect it in between
        return int(status)
    if pidfd is None:
        return None
    info = bytearray(_INFO_SIZE)  # Linux keeps the status in the pidfd when the parent has collected it
    struct.pack_into("Q", info, 0, _EXIT_KNOWN)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    known: int = struct.unpack_from("Q", info)[0] & _EXIT_KNOWN
    return int(struct.unpack_from("i", info, _STATUS_OFFSET)[0]) if known else None


def describe_end(status: int | None, *, memory_was_short: bool = False) -> str:
    """How a process ended, to be put after its name.

    Example:
        >>> describe_end(9), describe_end(3 << 8)
        ('was killed (signal 9)', 'ended with exit code 3 without saying why')
    """
    if status is None:
        return "ended without saying why"
    if not os.WIFSIGNALED(status):
        return f"ended with exit code {os.waitstatus_to_exitcode(status)} without saying why"
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        hint = "; the system ran out of memory, and has ended processes" if memory_was_short else ""
        return f"was killed (signal {number}{hint})"
    name = signal.strsignal(number) or "unknown"
    return f"was killed (signal {number}, {name.lower()})"


def out_of_memory_kills() -> int:
    """How many processes the host has ended because its memory, or a container's, was full."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _field(pid: int, number: int) -> str:
    """A field of /proc/<pid>/stat. The second one, the name, may hold spaces and parentheses."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return after_name[number - 3]


@dataclass(frozen=True)
class Member:
    """The process of one rank."""

    rank: int
    place: str
    """on the axes of the topology, such as "pipeline 1, data 0\""""
    address: str
    port: int
    pid: int
    started: int
    """when the process started, in clock ticks since its host did: another process with its pid has another one"""
    host: str
    """the same for processes that see each other in /proc"""

    def is_beside(self, other: "Member") -> bool:
        """Whether it is another process, and can be looked at from the other's."""
        return self.host == other.host and self.pid != other.pid

    @property
    def exists(self) -> bool:
        """Whether the process has not ended. Asked by processes of its host."""
        return started(self.pid) == self.started and state(self.pid) not in ENDED

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal. Asked by processes of its host."""
        return state(self.pid) in STOPPED and started(self.pid) == self.started


_parent = os.getppid()
"""the process that has started this one: as early as can be, for it may end while this one imports torch"""


def _note_parent() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_note_parent)


def lost_parent() -> int | None:
    """The id of the process that has started this one, if that has ended."""
    return None if os.getppid() == _parent else _parent


_PR_SET_PDEATHSIG = 1
_CODE = (
    "import ctypes,os,sys;parent,*command=sys.argv[1:];"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG},{int(signal.SIGKILL)});"
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
    _ask_for_signal(signal.SIGKILL)
    starter = multiprocessing.parent_process()
    if os.getppid() != parent if parent is not None else starter is not None and not starter.is_alive():
        os._exit(1)  # it has ended since


def begin_fork(parent: int | None = None) -> None:
    """The first thing in a fork that runs Python: end with the parent, and destroy nothing that is the parent's.

    A garbage collector that found the parent's garbage here would join the threads of its stores and process groups,
    which only the parent has, and crash.

    Args:
        parent: as in `end_with_parent`.
    """
    gc.freeze()
    end_with_parent(parent)


def outlive_parent() -> None:
    """Let this process run on when its parent ends: from now on somebody else sees to it that it ends."""
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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
