"""Two agents of torchrun with two processes each: if one agent or all that it has started ends, so does the rest.

agent 0    rank 0, rank 1          agent 1    rank 2, rank 3
                                   killed     see that it has ended, say so; 0 and 1 end, too
"""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from lightning_hanayo.monitor.processes import command_ending_with_parent
from tests.faults import agents_script
from tests.harness.launch import MARKER, ROOT, marked
from tests.harness.limits import wait_until

pytestmark = pytest.mark.thorough
SCRIPT = str(Path(agents_script.__file__))


@dataclass(frozen=True)
class Agents:
    """Two agents, whose four processes train."""

    agents: list["subprocess.Popen[bytes]"]
    pids: list[int]
    """of ranks 0 to 3"""
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> bool:
        """Whether all ranks end in time."""
        return wait_until(lambda: all(map(has_ended, self.pids)), 30.0)

    def said_of_agent_1(self, what: str) -> list[str]:
        """What the ranks have said of one of that agent's."""
        lines = self.output.splitlines()
        return [line for line in lines if line.startswith(("rank 2 (", "rank 3 (")) and what in line]


def has_ended(pid: int) -> bool:
    """Whether a process has ended; a stopped parent doesn't collect its state."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextmanager
def two_agents(folder: Path) -> Iterator[Agents]:
    mark, log = uuid.uuid4().hex, folder / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {MARKER: mark, "STARTED": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    with ExitStack() as stack, log.open("wb") as output:
        agents: list[subprocess.Popen[bytes]] = []
        stack.callback(end_marked, agents, mark)
        agents += [
            subprocess.Popen(
                command_ending_with_parent([*command, f"--node-rank={node}", SCRIPT]),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for node in range(2)
        ]
        files = [folder / str(rank) for rank in range(4)]
        assert wait_until(lambda: all(file.exists() for file in files), 90.0), log.read_text()
        yield Agents(agents, [int(file.read_text()) for file in files], log)


def end_marked(agents: list["subprocess.Popen[bytes]"], mark: str) -> None:
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for agent in agents:
        agent.wait()


def test_ranks_end_with_their_agent_and_say_why(tmp_path: Path) -> None:
    with two_agents(tmp_path) as run:
        run.agents[1].kill()
        run.agents[1].wait()
        assert run.end(), run.output
        agent = f"was started by torchrun's agent, process {run.agents[1].pid}, which has ended"
        assert len(run.said_of_agent_1(agent)) == 1, run.output


def test_a_host_that_ends_without_a_word_is_named(tmp_path: Path) -> None:
    with two_agents(tmp_path) as run:
        for pid in (run.agents[1].pid, *run.pids[2:]):
            os.kill(pid, signal.SIGKILL)
        run.agents[1].wait()
        assert run.end(), run.output
        assert len(run.said_of_agent_1("was killed (signal 9)")) == 1, run.output


def test_a_host_that_is_frozen_is_named(tmp_path: Path) -> None:
    with two_agents(tmp_path) as run:
        for pid in (run.agents[1].pid, *run.pids[2:]):
            os.kill(pid, signal.SIGSTOP)
        assert run.end(), run.output
        assert len(run.said_of_agent_1("was stopped (SIGSTOP or SIGTSTP)")) == 1, run.output
