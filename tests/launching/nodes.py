"""Starts one command for each node of a run, and reads the weights that it leaves."""

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from lightning_hanayo.monitor.processes import command_ending_with_parent
from tests.harness.launch import MARKER, ROOT, marked
from tests.harness.limits import wait_until
from tests.harness.pool import Pool
from tests.launching import script

SCRIPT = str(Path(script.__file__))
Weights = dict[str, torch.Tensor]
_OF_LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def run_nodes(
    folder: Path, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> tuple[list[int], str]:
    """The exit codes and the output of the commands, which run at the same time. Nothing of them is left running."""
    mark, log = uuid.uuid4().hex, folder / "log"
    own = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    own |= {MARKER: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | dict(environment or {})
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as output:
            for command in commands:
                nodes.append(
                    subprocess.Popen(
                        command_ending_with_parent(command), env=own, cwd=folder, stdout=output, stderr=output
                    )
                )
        ended = wait_until(lambda: all(node.poll() is not None for node in nodes), 90.0)
        assert ended, log.read_text(errors="replace")
        assert wait_until(lambda: not marked(mark), 5.0), "processes are left"
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.wait()
    return [node.returncode for node in nodes], log.read_text(errors="replace")


def one_process(pool: Pool, folder: Path) -> Weights:
    """The weights after the training in one process."""
    pool.run(1, script.main, 1, 1, folder / "weights.pt")
    return _weights(folder)


def trained(folder: Path, commands: Sequence[Sequence[str]], *, num_nodes: int, devices: int) -> tuple[Weights, str]:
    """The weights, and what was printed; checks which rank was where.

    The commands start SCRIPT with the arguments `arguments(folder, num_nodes, devices)`.
    """
    codes, output = run_nodes(folder, commands)
    assert codes == [0] * len(commands), output
    for rank in range(num_nodes * devices):
        assert (folder / f"rank-{rank}").read_text() == f"{rank // devices} {rank % devices}"
    return _weights(folder), output


def _weights(folder: Path) -> Weights:
    weights: Weights = torch.load(folder / "weights.pt", weights_only=True)
    return weights


def arguments(folder: Path, num_nodes: int, devices: int) -> list[str]:
    """What SCRIPT is started with."""
    return [str(num_nodes), str(devices), str(folder / "weights.pt")]
