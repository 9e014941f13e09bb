"""Looks at other processes of this host: when they started, whether they run, and how they ended.

process     /proc/<pid>/stat          pidfd, opened before
running     state R, S, D             not readable
stopped     state T or t              not readable
ended       state Z, exit status      readable
collected   no file                   readable; exit status on Linux 6.15 and later
"""

import os
import signal
import struct
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no Linux
    fcntl = None  # type: ignore[assignment]

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
    return None if pidfd is None else _collected_status(pidfd)


def describe_end(status: int | None, *, memory_was_short: bool = False) -> str:
    """What a process has done, to be put after its name.

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


def _collected_status(pidfd: int) -> int | None:
    """Linux keeps the status in the pidfd when the parent has collected it."""
    info = bytearray(_INFO_SIZE)
    struct.pack_into("Q", info, 0, _EXIT_KNOWN)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except (AttributeError, OSError):  # an older kernel
        return None
    known: int = struct.unpack_from("Q", info)[0] & _EXIT_KNOWN
    return int(struct.unpack_from("i", info, _STATUS_OFFSET)[0]) if known else None
