"""Launches a user's command, and waits until it and all processes that it started have ended."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from lightning_hanayo.monitor.processes import command_ending_with_parent
from tests.harness.limits import CLOCK, VARIABLE, slowness, wait_until

ROOT = Path(__file__).parents[2]
MARKER = "TEST_LAUNCH"


@dataclass(frozen=True)
class Ended:
    """The result of a launch."""

    code: int
    output: str  # of all processes together
    num_started: int  # processes that reached `main`
    seconds_after_fault: float  # until the last process had ended, in scaled seconds
    leftover: list[int]  # processes that had to be killed
    started: list[int]  # the ids of all that reached `main`


def launch(folder: Path, *arguments: str, timeout: float = 90.0, limit: float = 10.0) -> Ended:
    """Run `python *arguments`. All processes must end within `limit` scaled seconds of the fault.

    The command's environment has START_FILE, to which each process adds a line with its id, and FAULT_FILE, for the
    time of the fault.
    """
    mark = uuid.uuid4().hex
    started, fault, log = (folder / name for name in ("started", "fault", "log"))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    environment |= {MARKER: mark, "START_FILE": str(started), "FAULT_FILE": str(fault), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    factor = median(slowness() for _ in range(3))  # scales the package's own limits, which are constants
    environment[VARIABLE] = str(factor)
    started.touch()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command_ending_with_parent([sys.executable, *arguments]),
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    with CLOCK.at_least(factor):
        if not wait_until(lambda: process.poll() is not None or _scaled_since(_time_in(fault)) > limit, timeout):
            process.send_signal(signal.SIGABRT)
        fault_time = _time_in(fault)
        while (alive := marked(mark)) and _scaled_since(fault_time) < limit:
            time.sleep(0.05)
        seconds = _scaled_since(fault_time)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    text = log.read_text(errors="replace")
    pids = [int(pid) for pid in started.read_text().split()]
    return Ended(process.wait(), text, len(pids), seconds, alive, pids)


def _time_in(file: Path) -> float:
    """The moment that a process has written to the file; now, if there is none yet."""
    with suppress(OSError, ValueError):
        return float(file.read_text())
    return time.time()


def _scaled_since(moment: float) -> float:
    """Scaled seconds since `moment`, a value of `time.time`."""
    return CLOCK.now() - CLOCK.at(time.monotonic() - (time.time() - moment))


def marked(mark: str) -> list[int]:
    """The processes of this launch that still run. They have its marker in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == mark:
                found.append(process.pid)
    return found
